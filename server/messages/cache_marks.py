"""The marks `cache_control` of a request to the messages API: how many there are, and how long they ask to hold."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from troupellm.protocol.anthropic import PromptFields
from troupellm.protocol.checks import got
from troupellm.protocol.errors import InvalidRequest

MAX_MARKS: Final = 4
"""Of a request, as Anthropic's server has it."""
TTLS: Final = ("5m", "1h")
KIND: Final = "ephemeral"
_FIELD: Final = "cache_control"


def check_cache_marks(request: PromptFields) -> None:
    """
    Args:
        request: as the client has sent it, without what a thread brings: the marks of earlier turns do not count.

    Raises:
        InvalidRequest: a mark has another form, or there are too many; the error says how many.
    """
    number = 0 if request.cache_control is None else 1
    for here, mark in _marks(request):
        _check(mark, here)
        number += 1
    if number > MAX_MARKS:
        message = f"{_FIELD}: a maximum of {MAX_MARKS} blocks with {_FIELD} may be provided, got {number}"
        raise InvalidRequest(message, param=_FIELD)


def _marks(request: PromptFields) -> Iterator[tuple[str, object]]:
    """The marks with their places, in the order of the prompt."""
    yield from _marked("tools", request.tools)
    yield from _marked("system", request.system)
    for place, message in enumerate(request.messages):
        yield from _marked(f"messages[{place}].content", message.content)


def _marked(here: str, blocks: object) -> Iterator[tuple[str, object]]:
    """Of a list of blocks, and of what is inside the results of tools."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        return
    for place, block in enumerate(blocks):
        if not isinstance(block, Mapping):
            continue
        if block.get(_FIELD) is not None:
            yield f"{here}[{place}].{_FIELD}", block[_FIELD]
        inner = block.get("content") if block.get("type") == "tool_result" else None
        for position, part in enumerate(inner if isinstance(inner, list) else ()):
            if isinstance(part, Mapping) and part.get(_FIELD) is not None:
                yield f"{here}[{place}].content[{position}].{_FIELD}", part[_FIELD]


def _check(mark: Any, here: str) -> None:
    if not isinstance(mark, Mapping):
        raise InvalidRequest(f"{here} must be an object", param=here, code="invalid_type")
    kind, ttl = mark.get("type", KIND), mark.get("ttl")
    if kind != KIND:
        raise InvalidRequest(f"{here}.type must be {KIND}{got(kind)}", param=f"{here}.type")
    if ttl is not None and ttl not in TTLS:
        raise InvalidRequest(f"{here}.ttl must be {' or '.join(TTLS)}{got(ttl)}", param=f"{here}.ttl")
