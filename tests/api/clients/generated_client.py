"""The client that openapi-python-client made, in `made` beside this process's folder. Arguments: URL, model."""

import json
import sys

sys.path.insert(0, ".")

from made import Client
from made.api.chat import post_v1_chat_completions
from made.api.completions import post_v1_completions
from made.api.models import get_v1_models
from made.api.open_ import get_readyz
from made.api.tokenize import post_tokenize
from made.models import ChatMessage, ChatRequest, CompletionRequest, ErrorBody, TokenizeRequest


def main(url: str, model: str) -> None:
    client = Client(base_url=url)
    messages = [ChatMessage(role="user", content="What is 23 + 45?")]
    request = ChatRequest(model=model, messages=messages, max_tokens=24, temperature=0.0, logprobs=True)
    chat = post_v1_chat_completions.sync(client=client, body=request)
    text = post_v1_completions.sync(
        client=client, body=CompletionRequest(model=model, prompt="Once upon", max_tokens=8, temperature=0.0)
    )
    tokens = post_tokenize.sync(client=client, body=TokenizeRequest(prompt="Once upon"))
    wrong = post_v1_chat_completions.sync(client=client, body=ChatRequest(model="nobody", messages=messages))
    assert isinstance(wrong, ErrorBody)
    seen = {
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
