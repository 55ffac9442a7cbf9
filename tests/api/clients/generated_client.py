"""The client that openapi-python-client made, in `made` beside this process's folder. Arguments: URL, model."""

import json
import sys

sys.path.insert(0, ".")

from made import Client
from made.api.chat import post_v1_chat_completions
from made.api.completions import post_v1_completions
from made.api.embeddings import post_v1_embeddings
from made.api.files import get_v1_files
from made.api.messages import post_v1_messages
from made.api.models import get_v1_models
from made.api.open_ import get_readyz
from made.api.responses import get_v1_responses_response_id, post_v1_responses
from made.api.tokenize import post_tokenize
from made.models import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ErrorBody,
    InputMessage,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

QUESTION = "What is 23 + 45?"


def main(url: str, model: str) -> None:
    client = Client(base_url=url)
    messages = [ChatMessage(role="user", content=QUESTION)]
    request = ChatRequest(model=model, messages=messages, max_tokens=24, temperature=0.0, logprobs=True)
    chat = post_v1_chat_completions.sync(client=client, body=request)
    text = post_v1_completions.sync(
        client=client, body=CompletionRequest(model=model, prompt="Once upon", max_tokens=8, temperature=0.0)
    )
    tokens = post_tokenize.sync(client=client, body=TokenizeRequest(prompt="Once upon"))
    wrong = post_v1_chat_completions.sync(client=client, body=ChatRequest(model="nobody", messages=messages))
    assert isinstance(wrong, ErrorBody)
    asked = ResponsesRequest(model=model, input_=QUESTION, max_output_tokens=24, temperature=0.0)
    response = post_v1_responses.sync(client=client, body=asked)
    kept = get_v1_responses_response_id.sync(response.id, client=client)
    turn = InputMessage(role="user", content=QUESTION)
    message = post_v1_messages.sync(
        client=client, body=MessagesRequest(model=model, max_tokens=24, messages=[turn], temperature=0.0)
    )
    vectors = post_v1_embeddings.sync(client=client, body=EmbeddingRequest(model=model, input_="Once upon"))
    seen = {
        "response": response.output[-1].content[0].text,
        "kept": kept.output[-1].content[0].text,
        "message": message.content[0].text,
        "vectors": [len(item.embedding) > 0 for item in vectors.data],
        "files": get_v1_files.sync(client=client).data,
        "chat": chat.choices[0].message.content,
        "text": text.choices[0].text,
        "models": [card.id for card in get_v1_models.sync(client=client).data],
        "tokens": len(tokens.tokens),
        "count": tokens.count,
        "refused": [wrong.error.code, wrong.error.param],
        "probe": get_readyz.sync(client=client).status,
    }
    print(json.dumps(seen))


main(*sys.argv[1:3])
