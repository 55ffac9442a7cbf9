"""The events of a chat answer's text: content, reasoning, tool calls, in the order they come.

A piece is never taken back, and none holds part of a mark. Joined in order, the pieces of a stream are the whole
answer, however the text was cut while it came.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from troupellm.protocol.params.outputs import Message, TokenLogprob, ToolCall

TurnReason = Literal["stop", "length", "tool_calls", "repetition"]


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader; empty where only token ids or log-probabilities are new."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thought."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. Calls are numbered from 0 within their choice."""

    call: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, which joined are the text of a JSON object unless the model wrote something else."""

    call: int
    text: str


class Finished(msgspec.Struct, frozen=True, gc=False):
    """Nothing more comes for this choice."""

    reason: TurnReason
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it."""


ParsedPiece = Content | Reasoning | CallStart | CallArguments
TurnPiece = Content | Reasoning | CallStart | CallArguments | Finished


class TurnEvent(msgspec.Struct, frozen=True, gc=False):
    """One piece of one choice, with the tokens that came with it (which may have begun in an earlier piece)."""

    index: int
    piece: TurnPiece
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class TurnChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, parsed."""

    index: int
    content: str | None
    """None where there are tool calls, or only reasoning, and no content."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: TurnReason
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


def assemble(pieces: Sequence[ParsedPiece]) -> Message:
    """The pieces of one choice, joined."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for piece in pieces:
        match piece:
            case Content(text=text):
                content.append(text)
            case Reasoning(text=text):
                reasoning.append(text)
            case CallStart():
                calls.append((piece, []))
            case CallArguments(call=call, text=text):
                calls[call][1].append(text)
    thought = "".join(reasoning) or None
    text = "".join(content)
    tool_calls = tuple([ToolCall(start.id, start.name, "".join(arguments)) for start, arguments in calls])
    plain = None if not text and (tool_calls or thought) else text
    return Message(content=plain, reasoning=thought, tool_calls=tool_calls)
