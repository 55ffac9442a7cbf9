"""Answers to recorded requests: whether a stream is what its client reads, and what it says of the prompt."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import openai.types.chat
import openai.types.responses
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from troupellm.tests.support.clients.recorded_requests import conversation, num_equal

PART = 0.95
"""Of the prompt of the turn before."""


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    """Made at its first use: it takes a quarter of a second."""
    return TypeAdapter(kind)


def events_of_any(text: str) -> list[dict[str, Any]]:
    """The JSON of each event of a stream, with or without names; comments left out."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check_stream(path: str, text: str) -> None:
    """The events are those of the API, in an order that its clients accept, and the stream ends well."""
    events = events_of_any(text)
    kinds = [event.get("type") for event in events]
    if "/messages" in path:
        reader = _reader(RawMessageStreamEvent)
        for event in events:
            if event["type"] != "ping":
                reader.validate_python(event)
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    elif "/responses" in path:
        reader = _reader(openai.types.responses.ResponseStreamEvent)
        for event in events:
            reader.validate_python(event)
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") > 0
    else:
        for event in events:
            openai.types.chat.ChatCompletionChunk.model_validate(event)
        assert text.rstrip().endswith("data: [DONE]")
        assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] in (
            "stop",
            "tool_calls",
        )


def usage_of(answer: str) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were cached, as a stream tells them."""
    found: Mapping[str, Any] = {}
    for event in events_of_any(answer):
        holder = event.get("response") or event.get("message") or event
        found = {**found, **(holder.get("usage") or {})}
    if "cache_read_input_tokens" in found:
        cached = found["cache_read_input_tokens"] or 0
        return found["input_tokens"] + cached + (found.get("cache_creation_input_tokens") or 0), cached
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    return found.get("prompt_tokens", found.get("input_tokens", 0)), details.get("cached_tokens") or 0


def uncached(turns: Sequence[tuple[Mapping[str, Any], str]]) -> list[str]:
    """Turns that carry the one before on, and find less of its prompt in the cache than they should.

    Args:
        turns: bodies of requests and their answers, in order.
    """
    found = []
    for (before, first), (after, second) in pairwise(turns):
        (prompt, _), (_, cached) = usage_of(first), usage_of(second)
        if carries_on(before, after) and cached < PART * prompt:
            found.append(f"{cached} of {prompt} tokens")
    return found


def carries_on(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """The tools are the same, and so is the conversation but for its last two entries, which may get marks."""
    first, second = conversation(before), conversation(after)
    same_tools = len(before.get("tools") or ()) == len(after.get("tools") or ()) > 0
    return same_tools and len(second) > len(first) and num_equal(first, second) >= len(first) - 2 > 0
