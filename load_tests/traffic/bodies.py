"""The request bodies of `bench input`: the same long prose for every route that turns text into tokens."""

from typing import Any

import msgspec

_PROSE = (
    "The harbour was quiet that morning, and 214 boats lay beside the old pier. A child counted them twice, "
    "lost the number, and began again; nobody minded, because the tide would not turn before noon.\n"
)
SHORT_MESSAGE = 2_000
"""Characters of one message where a conversation has many."""


class Body(msgspec.Struct, frozen=True):
    """One request that is larger than anything that the event loop may handle in one piece."""

    name: str
    path: str
    content: bytes
    statuses: tuple[int, ...]
    """Answers that are right: 400 where the prompt is longer than the context."""


def bodies(model: str, num_bytes: int) -> list[Body]:
    """One body for each route, of `num_bytes` bytes as JSON, and a conversation of many messages beside them."""
    room = num_bytes - 1_024  # for what surrounds the text
    text = (_PROSE * (room // len(_PROSE) + 1))[: room - room // len(_PROSE) - 1]  # JSON writes a newline as two bytes
    message = [{"role": "user", "content": text}]
    parts = [text[at : at + SHORT_MESSAGE] for at in range(0, len(text), SHORT_MESSAGE)]
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": part}
        for at, part in enumerate(parts[: len(parts) * 31 // 32])
    ]
    answer = {"max_tokens": 1, "temperature": 0}
    return [
        _body("tokenize", "/tokenize", {"model": model, "prompt": text}, 200),
        _body("count_tokens", "/v1/messages/count_tokens", {"model": model, "messages": message}, 200),
        _body("input_tokens", "/v1/responses/input_tokens", {"model": model, "input": text}, 200),
        _body("chat", "/v1/chat/completions", {"model": model, "messages": message, **answer}, 400),
        _body("chat, many turns", "/v1/chat/completions", {"model": model, "messages": turns, **answer}, 400),
        _body("embeddings", "/v1/embeddings", {"model": model, "input": text}, 400),
    ]


def _body(name: str, path: str, fields: dict[str, Any], *statuses: int) -> Body:
    return Body(name, path, msgspec.json.encode(fields), statuses)
