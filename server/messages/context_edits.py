"""Edits that make a conversation shorter before it is rendered: `context_management` of Anthropic's API.

Results of old tool calls give way to a line of text, and old reasoning is left out. The client keeps the whole
conversation and sends it again, and a thread holds it whole.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from troupellm.protocol.api.anthropic import AppliedEdit, ContextEdit, EditAmount, InputMessage, PromptFields
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import got
from troupellm.server.base.skipped import skipped_names

CLEAR_TOOLS: Final = "clear_tool_uses_20250919"
CLEAR_THINKING: Final = "clear_thinking_20251015"
TRIGGER_TOKENS: Final = 100_000
KEPT_TOOL_USES: Final = 3
KEPT_THINKING_TURNS: Final = 1
CLEARED: Final = "[The result of this tool call was cleared to save context]"
_TOKENS, _TOOL_USES, _TURNS = "input_tokens", "tool_uses", "thinking_turns"
_EDITS: Final = "context_management.edits"

_Block = Mapping[str, Any]

RequestT = TypeVar("RequestT", bound=PromptFields)
Count = Callable[[RequestT], Awaitable[int]]
"""How many tokens the prompt of a request has."""
Work = Callable[[], Any]


class Edited(msgspec.Struct, frozen=True):
    request: Any
    """With the shorter conversation."""
    applied: list[AppliedEdit]
    skipped: list[str]
    """Edits of unknown types; see `skipped_names`."""
    tokens_before: int | None
    """Of the prompt without the edits, where an edit was applied."""
    tokens: int | None
    """Of the prompt with them, where it was counted."""


async def edited(request: RequestT, count: Count[RequestT], read: Callable[[Work], Awaitable[Any]]) -> Edited:
    """Counts a prompt at most once, and once more for each edit.

    Args:
        read: calls what reads every part of the conversation; on a thread where that takes long.

    Raises:
        InvalidRequest: an edit has a wrong field, or is one of two of a type.
        TroupeError: the prompt could not be counted.
    """
    given = [] if request.context_management is None else request.context_management.edits or []
    for place, edit in enumerate(given):
        _check(edit, f"{_EDITS}[{place}]")
    if len({edit.type for edit in given}) < len(given):
        raise InvalidRequest(f"{_EDITS} must have at most one edit of each type", param=_EDITS)
    tokens: int | None = None
    first: int | None = None
    applied: list[AppliedEdit] = []
    for edit in given:
        made = await read(partial(_edit, request, edit))
        if made is None:
            continue
        messages, number = made
        shorter = msgspec.structs.replace(request, messages=messages)
        tokens = await count(request) if tokens is None else tokens
        if edit.type == CLEAR_TOOLS and _trigger(edit).type == _TOKENS and tokens <= _trigger(edit).value:
            continue
        left = await count(shorter)
        if edit.clear_at_least is not None and tokens - left < edit.clear_at_least.value:
            continue
        first = tokens if first is None else first
        applied.append(
            AppliedEdit(
                type=edit.type,
                cleared_tool_uses=number if edit.type == CLEAR_TOOLS else UNSET,
                cleared_thinking_turns=number if edit.type == CLEAR_THINKING else UNSET,
                cleared_input_tokens=tokens - left,
            )
        )
        request, tokens = shorter, left
    unknown = [edit.type for edit in given if edit.type not in (CLEAR_TOOLS, CLEAR_THINKING)]
    return Edited(request, applied, skipped_names("edit", unknown), first, tokens)


def _edit(request: PromptFields, edit: ContextEdit) -> tuple[list[InputMessage], int] | None:
    """The messages without what an edit clears, and how much that is; None where it is nothing."""
    if edit.type == CLEAR_THINKING:
        return _without_thinking(request.messages, edit)
    if edit.type == CLEAR_TOOLS:
        return _without_results(request.messages, edit)
    return None


def _without_results(messages: Sequence[InputMessage], edit: ContextEdit) -> tuple[list[InputMessage], int] | None:
    uses, owners = _paired(messages)
    trigger = _trigger(edit)
    if trigger.type == _TOOL_USES and len(uses) <= trigger.value:
        return None
    keep = edit.keep.value if isinstance(edit.keep, EditAmount) else KEPT_TOOL_USES
    old = uses[: max(0, len(uses) - keep)]
    cleared = {id(use) for use in old if use.get("name") not in (edit.exclude_tools or ())}
    cleared &= {
        id(owners[id(block)])
        for message in messages
        for block in _blocks(message)
        if id(block) in owners and block.get("content") != CLEARED
    }
    if not cleared:
        return None

    def clear(block: Any) -> Any:
        if id(block) in owners and id(owners[id(block)]) in cleared:
            return {**block, "content": CLEARED}
        if id(block) in cleared:
            inputs = edit.clear_tool_inputs
            wanted = block.get("name") in inputs if isinstance(inputs, list) else bool(inputs)
            return {**block, "input": {}} if wanted else block
        return block

    return [_changed(message, [clear(block) for block in _raw(message)]) for message in messages], len(cleared)


def _paired(messages: Sequence[InputMessage]) -> tuple[list[_Block], dict[int, _Block]]:
    """The calls of tools, oldest first, and the call of each result by the result's identity.

    A result belongs to the newest call before it with its id: some clients use an id again. One without an id has none.
    """
    uses: list[_Block] = []
    newest: dict[str, _Block] = {}
    owners: dict[int, _Block] = {}
    for block in (block for message in messages for block in _blocks(message)):
        if block.get("type") == "tool_use":
            uses.append(block)
            if isinstance(name := block.get("id"), str):
                newest[name] = block
        elif block.get("type") == "tool_result":
            name = block.get("tool_use_id")
            if isinstance(name, str) and name in newest:
                owners[id(block)] = newest[name]
    return uses, owners


def _without_thinking(messages: Sequence[InputMessage], edit: ContextEdit) -> tuple[list[InputMessage], int] | None:
    if edit.keep == "all":
        return None
    keep = edit.keep.value if isinstance(edit.keep, EditAmount) else KEPT_THINKING_TURNS
    turns = list(_turns(messages))
    thinking = sorted({turn for turn, message in zip(turns, messages, strict=True) if _thinks(message)})
    old = set(thinking[: max(0, len(thinking) - keep)])
    if not old:
        return None
    return [
        _changed(message, [block for block in _raw(message) if not _is_thought(block)]) if turn in old else message
        for turn, message in zip(turns, messages, strict=True)
    ], len(old)


def _turns(messages: Sequence[InputMessage]) -> Iterator[int]:
    """The number of each message's turn; one begins where the user says more than the results of tools."""
    turn = 0
    for message in messages:
        results = [isinstance(block, Mapping) and block.get("type") == "tool_result" for block in _raw(message)]
        if message.role == "user" and not (results and all(results)):
            turn += 1
        yield turn


def _thinks(message: InputMessage) -> bool:
    return message.role == "assistant" and any(_is_thought(block) for block in _raw(message))


def _is_thought(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") in ("thinking", "redacted_thinking")


def _raw(message: InputMessage) -> list[Any]:
    return message.content if isinstance(message.content, list) else []


def _blocks(message: InputMessage) -> list[_Block]:
    return [block for block in _raw(message) if isinstance(block, Mapping)]


def _changed(message: InputMessage, blocks: list[Any]) -> InputMessage:
    if not isinstance(message.content, list):
        return message
    return msgspec.structs.replace(message, content=blocks or [{"type": "text", "text": ""}])


def _trigger(edit: ContextEdit) -> EditAmount:
    return edit.trigger or EditAmount(type=_TOKENS, value=TRIGGER_TOKENS)


def _check(edit: ContextEdit, here: str) -> None:
    """
    Raises:
        InvalidRequest: an amount is one of another thing.
    """
    kept = {CLEAR_TOOLS: _TOOL_USES, CLEAR_THINKING: _TURNS}.get(edit.type)
    if kept is None:
        return
    allowed = (
        ("trigger", edit.trigger, (_TOKENS, _TOOL_USES)),
        ("keep", edit.keep, (kept,)),
        ("clear_at_least", edit.clear_at_least, (_TOKENS,)),
    )
    for name, amount, kinds in allowed:
        if isinstance(amount, str):
            if edit.type != CLEAR_THINKING or amount != "all":
                raise InvalidRequest(f"{here}.keep must be {_words(edit)}{got(amount)}", param=f"{here}.keep")
        elif amount is not None and amount.type not in kinds:
            param = f"{here}.{name}.type"
            raise InvalidRequest(f"{param} must be {' or '.join(kinds)}{got(amount.type)}", param=param)


def _words(edit: ContextEdit) -> str:
    return "an object of type thinking_turns, or all" if edit.type == CLEAR_THINKING else "an object of type tool_uses"
