"""langchain-openai as its users call it. Arguments: URL of the API, model. Prints what it saw as JSON."""

import json
import sys
from collections.abc import Iterable

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum."""

    first: int
    second: int


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def together(stream: Iterable[AIMessageChunk]) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for piece in stream:
        whole = piece if whole is None else whole + piece
    assert whole is not None
    return whole


def main(url: str, model: str) -> None:
    common = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=24, stream_usage=True)
    longer = ChatOpenAI(**common, max_tokens=96)
    question = [("system", "You calculate."), ("human", "What is 23 + 45?")]
    whole = chat.invoke(question)
    pieces = together(chat.stream(question))
    adding = longer.bind_tools([add], tool_choice="add")
    forced, streamed_forced = adding.invoke(question), together(adding.stream(question))
    summing = longer.with_structured_output(Sum, method="json_schema")
    structured, streamed_structured = summing.invoke(question), list(summing.stream(question))[-1]
    text = OpenAI(**common, max_tokens=8)
    # Lengths are checked with a tokenizer that is fetched, unless it is told that the server's model has another.
    where = {"base_url": url, "api_key": "none", "model": model, "max_retries": 0}
    embeddings = OpenAIEmbeddings(**where, check_embedding_ctx_length=False)
    seen = {
        "whole": whole.content,
        "streamed": pieces.content,
        "usage": whole.usage_metadata["output_tokens"] if whole.usage_metadata else None,
        "streamed_usage": pieces.usage_metadata["output_tokens"] if pieces.usage_metadata else None,
        "finish": whole.response_metadata["finish_reason"],
        "calls": [[call["name"], sorted(call["args"])] for call in forced.tool_calls],
        "said": [[call["name"], call["args"]] for call in forced.tool_calls],
        "streamed_said": [[call["name"], call["args"]] for call in streamed_forced.tool_calls],
        "structured": sorted(structured.model_dump()) if isinstance(structured, Sum) else repr(structured),
        "structured_values": structured.model_dump() if isinstance(structured, Sum) else repr(structured),
        "streamed_values": (
            streamed_structured.model_dump() if isinstance(streamed_structured, Sum) else repr(streamed_structured)
        ),
        "vectors": embeddings.embed_documents(["a fox", "x"]),
        "query": embeddings.embed_query("a fox"),
        "batch": [answer.content for answer in chat.batch([question, question])],
        "text": text.invoke("Once upon"),
        "text_streamed": "".join(text.stream("Once upon")),
    }
    print(json.dumps(seen))


main(*sys.argv[1:3])
