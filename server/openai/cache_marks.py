"""`cache_control` of content blocks: up to which places a client wants its prompt kept in the KV cache."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.api.anthropic import PromptFields
from troupellm.protocol.api.chat import ChatMessage
from troupellm.protocol.config.kv_hints import MAX_CACHE_MARKS, TTL_SECONDS, CacheMark
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import got

_FIELD = "cache_control"
_KIND = "ephemeral"
_TAIL = 256
"""Characters of a block's text by which its end is found in the rendered prompt."""
_UNLIKE_JSON = "\"\\\n\r\t<>&'"
"""Characters that a template which shows tools as JSON may write in another way."""

Placed = tuple[str, Any]
"""Where a block stands in the request, and the block."""


def marks_of_chat(messages: Sequence[ChatMessage]) -> tuple[CacheMark, ...]:
    """The marks of a chat request's parts.

    Raises:
        InvalidRequest: too many, or one that cannot be read; names its place.
    """
    return _read(
        _listed(f"messages[{number}].content", message.content)
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
    )


def marks_of_message(request: PromptFields, *, last: bool = False) -> tuple[CacheMark, ...]:
    """The marks of a request to the messages API: of its tools, its system, its messages, and of its own.

    Args:
        last: take the last ones of too many: a thread adds the marks of its earlier requests.

    Raises:
        InvalidRequest: too many, or one that cannot be read; names its place.
    """
    blocks: list[Iterable[Placed]] = [_listed("tools", request.tools), _listed("system", request.system)]
    for number, message in enumerate(request.messages):
        here = f"messages[{number}].content"
        for place, block in _listed(here, message.content):
            if isinstance(block, Mapping):
                blocks.append(_listed(f"{place}.content", block.get("content")))
            blocks.append([(place, block)])
    if request.cache_control is not None:
        blocks.append([("", {_FIELD: msgspec.to_builtins(request.cache_control)})])
    return _read(blocks, last=last)


def _listed(here: str, blocks: object) -> Iterator[Placed]:
    if isinstance(blocks, list):
        for number, block in enumerate(blocks):
            yield f"{here}[{number}]", block


def _read(blocks: Iterable[Iterable[Placed]], *, last: bool = False) -> tuple[CacheMark, ...]:
    marks = []
    for here, block in (placed for run in blocks for placed in run):
        given = block.get(_FIELD) if isinstance(block, Mapping) else None
        if given is not None:
            marks.append(CacheMark(_tail(block), _seconds(f"{here}.{_FIELD}".lstrip("."), given)))
    if len(marks) > MAX_CACHE_MARKS and not last:
        message = f"{_FIELD}: a maximum of {MAX_CACHE_MARKS} blocks with {_FIELD} may be provided, got {len(marks)}"
        raise InvalidRequest(message, param=_FIELD)
    return tuple(marks[-MAX_CACHE_MARKS:])


def _seconds(here: str, given: object) -> float:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{here} must be an object", param=here, code="invalid_type")
    kind, ttl = given.get("type", _KIND), given.get("ttl")
    if kind != _KIND:
        raise InvalidRequest(f"{here}.type must be {_KIND}{got(kind)}", param=f"{here}.type")
    if ttl is None:
        return TTL_SECONDS["5m"]
    seconds = TTL_SECONDS.get(ttl) if isinstance(ttl, str) else None
    if seconds is None:
        raise InvalidRequest(f"{here}.ttl must be {' or '.join(TTL_SECONDS)}{got(ttl)}", param=f"{here}.ttl")
    return seconds


def _tail(block: Mapping[str, Any]) -> str:
    """The last characters of a block's text, as a template renders them; empty where that is not known."""
    if "input_schema" in block:
        return _tail_of_tool(block)
    text = block.get("text")
    if text is None:
        content = block.get("content")
        if isinstance(content, list) and content and isinstance(content[-1], Mapping):
            content = content[-1].get("text")
        text = content
    return text.rstrip()[-_TAIL:].lstrip() if isinstance(text, str) else ""


def _tail_of_tool(tool: Mapping[str, Any]) -> str:
    """The end of its description as far as JSON writes it as it is, else its name."""
    description, name = tool.get("description"), tool.get("name")
    text = description.rstrip() if isinstance(description, str) else ""
    begin = len(text)
    while begin > max(0, len(text) - _TAIL) and text[begin - 1].isascii() and text[begin - 1] not in _UNLIKE_JSON:
        begin -= 1
    tail = text[begin:].lstrip()
    return tail or (name if isinstance(name, str) else "")
