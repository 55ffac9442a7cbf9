"""langchain-openai as its users call it. Arguments: URL of the API, model. Prints what it saw as JSON."""

import json
import sys

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum."""

    first: int
    second: int


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def main(url: str, model: str) -> None:
    common = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=24, stream_usage=True)
    question = [("system", "You calculate."), ("human", "What is 23 + 45?")]
    whole = chat.invoke(question)
    pieces: AIMessageChunk | None = None
    for piece in chat.stream(question):
        pieces = piece if pieces is None else pieces + piece
    assert pieces is not None
    forced = ChatOpenAI(**common, max_tokens=96).bind_tools([add], tool_choice="add").invoke(question)
    structured = ChatOpenAI(**common, max_tokens=96).with_structured_output(Sum, method="json_schema").invoke(question)
    text = OpenAI(**common, max_tokens=8)
    seen = {
        "whole": whole.content,
        "streamed": pieces.content,
        "usage": whole.usage_metadata["output_tokens"] if whole.usage_metadata else None,
        "streamed_usage": pieces.usage_metadata["output_tokens"] if pieces.usage_metadata else None,
        "finish": whole.response_metadata["finish_reason"],
        "calls": [[call["name"], sorted(call["args"])] for call in forced.tool_calls],
        "structured": sorted(structured.model_dump()) if isinstance(structured, Sum) else repr(structured),
        "batch": [answer.content for answer in chat.batch([question, question])],
        "text": text.invoke("Once upon"),
        "text_streamed": "".join(text.stream("Once upon")),
    }
    print(json.dumps(seen))


main(*sys.argv[1:3])
