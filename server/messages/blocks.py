"""Anthropic's messages and content blocks as chat messages.

Messages of one role in a row are one turn, and the templates of many models refuse two turns of a role. A user's tool
results become messages of the tool role, before the text that stands beside them; an assistant's thinking, text and
tool uses become one message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from troupellm.protocol.anthropic import InputMessage
from troupellm.protocol.checks import printable
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.open_objects import SKIPPED_BLOCKS, Block
from troupellm.server.history import MAX_MESSAGES

Placed = tuple[str, Block]
"""Where a block stands in the request, and the block."""

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
    for role, turn in groupby(enumerate(given), lambda numbered: numbered[1].role):
        contents = [(f"messages[{position}].content", message.content) for position, message in turn]
        match role:
            case "user":
                _add_user(messages, _blocks(contents), calls)
            case "assistant":
                messages.append(_assistant(_blocks(contents), calls))
            case "system":
                messages += [{"role": "system", "content": text_of(content, here)} for here, content in contents]
    return messages


def _blocks(contents: Iterable[tuple[str, str | list[Block]]]) -> Iterator[Placed]:
    """All blocks of a turn."""
    for here, content in contents:
        if isinstance(content, str):
            yield here, {"type": "text", "text": content}
        else:
            yield from ((f"{here}[{position}]", block) for position, block in enumerate(content))


def _add_user(messages: list[dict[str, Any]], blocks: Iterable[Placed], calls: set[str]) -> None:
    texts: list[str] = []
    results = 0
    for place, block in blocks:
        if _kind(block, place) == "tool_result":
            messages.append(_tool_result(block, place, calls))
            results += 1
        else:
            texts += filter(None, _texts(block, place))
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


def _assistant(blocks: Iterable[Placed], calls: set[str]) -> dict[str, Any]:
    thoughts: list[str] = []
    texts: list[str] = []
    uses: list[dict[str, Any]] = []
    for place, block in blocks:
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
