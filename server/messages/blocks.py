"""Anthropic's messages and content blocks as chat messages.

A user's tool results become messages of the tool role, before the text that stands beside them; an assistant's
thinking, text and tool uses become one message. Texts of one role in a row are one turn here, and one message.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from troupellm.protocol.anthropic import InputMessage
from troupellm.protocol.checks import printable
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.open_objects import SKIPPED_BLOCKS, Block
from troupellm.server.history import MAX_MESSAGES

_BETWEEN = {"user": "\n\n", "assistant": ""}
"""Texts of a turn, by its role."""
_SKIPPED_ENDING = "_tool_result"
"""Of the results of such tools; the client's own are `tool_result`."""


def skipped_blocks(given: Sequence[InputMessage]) -> list[str]:
    """Types of the blocks that nobody here can read."""
    blocks = [block for message in given if isinstance(message.content, list) for block in message.content]
    return [kind for block in blocks if isinstance(kind := block.get("type"), str) and _is_skipped(kind)]


def messages_of(system: str | Sequence[Block] | None, given: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Chat messages.

    Raises:
        InvalidRequest: too many; or names `messages[i].content[j]` and what is wrong there.
    """
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"messages must have at most {MAX_MESSAGES} entries", param="messages")
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": text_of(system, "system")})
    calls: set[str] = set()
    for position, message in enumerate(given):
        here = f"messages[{position}]"
        match message.role:
            case "user":
                _add_user(messages, message.content, f"{here}.content", calls)
            case "assistant":
                messages.append(_assistant(message.content, f"{here}.content", calls))
            case "system":
                messages.append({"role": "system", "content": text_of(message.content, f"{here}.content")})
    return _in_turns(messages)


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without two texts of one role in a row, which the templates of many models refuse."""
    turns: list[dict[str, Any]] = []
    for (role, is_text), group in groupby(messages, lambda one: (one["role"], one.keys() == {"role", "content"})):
        several = list(group)
        if is_text and role in _BETWEEN and len(several) > 1:
            texts = [one["content"] for one in several if one["content"]]
            several = [{"role": role, "content": _BETWEEN[role].join(texts)}]
        turns += several
    return turns


def _add_user(messages: list[dict[str, Any]], content: str | list[Block], here: str, calls: set[str]) -> None:
    if isinstance(content, str):
        messages.append({"role": "user", "content": content})
        return
    texts: list[str] = []
    results = 0
    for position, block in enumerate(content):
        place = f"{here}[{position}]"
        if _kind(block, place) == "tool_result":
            messages.append(_tool_result(block, place, calls))
            results += 1
        else:
            texts += _texts(block, place)
    if texts or not results:
        messages.append({"role": "user", "content": "\n\n".join(texts)})


def _tool_result(block: Block, here: str, calls: set[str]) -> dict[str, Any]:
    use = block.get("tool_use_id")
    if not isinstance(use, str) or use not in calls:
        message = f"{here}.tool_use_id answers no tool_use before it"
        raise InvalidRequest(message, param=f"{here}.tool_use_id")
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{here}.content")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": use, "content": text}


def _assistant(content: str | list[Block], here: str, calls: set[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    thoughts: list[str] = []
    texts: list[str] = []
    uses: list[dict[str, Any]] = []
    for position, block in enumerate(content):
        place = f"{here}[{position}]"
        match _kind(block, place):
            case "thinking":
                thoughts.append(_text(block.get("thinking"), f"{place}.thinking"))
            case "tool_use":
                uses.append(_tool_use(block, place))
                calls.add(uses[-1]["id"])
            case _:
                texts += _texts(block, place)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not uses else None}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if uses:
        message["tool_calls"] = uses
    return message


def _tool_use(block: Block, here: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{here}.input must be an object", param=f"{here}.input", code="invalid_type")
    function = {
        "name": _text(block.get("name"), f"{here}.name"),
        "arguments": msgspec.json.encode(given).decode(),
    }
    return {"id": _text(block.get("id"), f"{here}.id"), "type": "function", "function": function}


def text_of(content: object, here: str) -> str:
    """The text of a content that is text or a list of blocks with nothing but text.

    Raises:
        InvalidRequest: it is neither; images and documents are not supported.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{here} must be a text or a list of blocks", param=here, code="invalid_type")
    return "\n\n".join(
        [text for position, block in enumerate(content) for text in _texts(block, f"{here}[{position}]")]
    )


def _texts(block: Block, here: str) -> list[str]:
    """The texts of a block that stands for itself."""
    kind = _kind(block, here)
    if kind == "text":
        return [_text(block.get("text"), f"{here}.text")]
    if kind == "tool_reference":
        return [_text(block.get("tool_name"), f"{here}.tool_name")]
    if kind == "search_result":
        title = _text(block.get("title"), f"{here}.title")
        return [f"{title}\n{text_of(block.get('content'), f'{here}.content')}"]
    if kind == "document" and isinstance(source := block.get("source"), Mapping):
        if source.get("type") == "text":
            return [_text(source.get("data"), f"{here}.source.data")]
        if source.get("type") == "content":
            return [text_of(source.get("content"), f"{here}.source.content")]
    if _is_skipped(kind):
        return []
    message = f"{here}: blocks of type {printable(kind)} are not supported here, only text"
    raise InvalidRequest(message, param=f"{here}.type", code="unsupported_parameter")


def _is_skipped(kind: str) -> bool:
    return kind in SKIPPED_BLOCKS or kind.endswith(_SKIPPED_ENDING)


def _kind(block: object, here: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{here} must be an object with a type", param=here, code="invalid_type")
    return kind


def _text(value: object, here: str) -> str:
    if not isinstance(value, str):
        problem = "is missing" if value is None else "must be a text"
        raise InvalidRequest(f"{here} {problem}", param=here, code="invalid_type")
    return value
