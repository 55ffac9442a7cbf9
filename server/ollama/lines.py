"""From the events of a chat turn to the lines of an answer in Ollama's form.

An answer that is not streamed is one line with everything in it.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.protocol.api.chat import ChatTokenLogprob
from troupellm.protocol.api.ollama import (
    OllamaAnswer,
    OllamaCall,
    OllamaChatLine,
    OllamaFunction,
    OllamaGenerateLine,
    OllamaLine,
)
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, Finished, Reasoning, TurnEvent
from troupellm.protocol.params.outputs import Timing, TokenLogprob, Usage
from troupellm.server.messages.builder import call_input
from troupellm.server.openai.logprobs import chat_logprobs

_encode = msgspec.json.Encoder().encode
_REASONS = {"length": "length"}
"""The others are stop to Ollama's clients, calls of tools among them."""


class Piece(msgspec.Struct, kw_only=True):
    """The new parts of an answer."""

    content: str = ""
    thinking: str | UnsetType = UNSET
    calls: list[OllamaCall] | UnsetType = UNSET


Shape = Callable[[Piece, dict[str, Any]], OllamaLine]
"""Makes a line of the new parts, and of the fields that every line has."""


def chat_line(piece: Piece, fields: dict[str, Any]) -> OllamaChatLine:
    answer = OllamaAnswer(content=piece.content, thinking=piece.thinking, tool_calls=piece.calls)
    return OllamaChatLine(message=answer, **fields)


def generate_line(piece: Piece, fields: dict[str, Any]) -> OllamaGenerateLine:
    return OllamaGenerateLine(response=piece.content, thinking=piece.thinking, **fields)


class Lines:
    """Follows one answer."""

    def __init__(self, shape: Shape, model: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """
        Args:
            model: the name to report.
            now: the time that a line is made.
        """
        self._shape = shape
        self._model = model
        self._now = now
        self._calls = 0
        self._call: CallStart | None = None
        """The call whose arguments are still coming: a line has whole calls."""
        self._arguments: list[str] = []
        self._reason = "stop"

    def silent(self) -> bytes:
        """A line without anything new, to show that the answer is still coming."""
        return self._line(Piece())

    def feed(self, events: Iterable[TurnEvent]) -> bytes:
        """The lines of some events; there may be none."""
        pieces, logprobs = self._pieces(events)
        return b"".join([self._line(piece, logprobs if number == 0 else ()) for number, piece in enumerate(pieces)])

    def end(self, usage: Usage, timing: Timing) -> bytes:
        """The last line."""
        return self._line(Piece(), (), done=True, **self._totals(usage, timing))

    def whole(self, events: Iterable[TurnEvent], usage: Usage, timing: Timing) -> bytes:
        """A whole answer as one text."""
        pieces, logprobs = self._pieces(events)
        thoughts = [piece.thinking for piece in pieces if isinstance(piece.thinking, str)]
        calls = [call for piece in pieces for call in piece.calls or ()]
        joined = Piece(
            content="".join([piece.content for piece in pieces]),
            thinking="".join(thoughts) if thoughts else UNSET,
            calls=calls or UNSET,
        )
        return self._line(joined, logprobs, done=True, **self._totals(usage, timing)).rstrip(b"\n")

    def loaded(self, reason: str) -> bytes:
        """The answer to a request without a prompt."""
        return self._line(Piece(), (), done=True, done_reason=reason)

    def _line(self, piece: Piece, logprobs: Sequence[TokenLogprob] = (), **more: Any) -> bytes:
        described = chat_logprobs(logprobs) if logprobs else None
        found: list[ChatTokenLogprob] | UnsetType = UNSET if described is None else described.content
        fields = {"model": self._model, "created_at": timestamp(self._now()), "logprobs": found, **more}
        return _encode(self._shape(piece, fields)) + b"\n"

    def _pieces(self, events: Iterable[TurnEvent]) -> tuple[list[Piece], list[TokenLogprob]]:
        """New parts in as few lines as keep their order: thinking comes before content in a line."""
        pieces: list[Piece] = []
        logprobs: list[TokenLogprob] = []
        for event in events:
            logprobs += event.logprobs or ()
            match event.piece:
                case Reasoning(text=text) if text:
                    last = pieces[-1] if pieces and not pieces[-1].content and not pieces[-1].calls else None
                    if last is None:
                        pieces.append(Piece(thinking=text))
                    else:
                        last.thinking = (last.thinking or "") + text
                case Content(text=text) if text:
                    if not pieces or pieces[-1].calls:
                        pieces.append(Piece())
                    pieces[-1].content += text
                case CallStart() as start:
                    self._end_call(pieces)
                    self._call = start
                case CallArguments(text=text):
                    self._arguments.append(text)
                case Finished(reason=reason):
                    self._end_call(pieces)
                    self._reason = _REASONS.get(reason, "stop")
                case _:
                    pass
        if logprobs and not pieces:
            pieces.append(Piece())
        return pieces, logprobs

    def _end_call(self, pieces: list[Piece]) -> None:
        start = self._call
        if start is None:
            return
        function = OllamaFunction(index=self._calls, name=start.name, arguments=call_input("".join(self._arguments)))
        call = OllamaCall(id=start.id, function=function)
        if pieces and pieces[-1].calls:
            pieces[-1].calls.append(call)
        else:
            pieces.append(Piece(calls=[call]))
        self._calls += 1
        self._call, self._arguments = None, []

    def _totals(self, usage: Usage, timing: Timing) -> dict[str, Any]:
        scheduled, first, finished = timing.scheduled or 0.0, timing.first_token or 0.0, timing.finished or 0.0
        return {
            "done_reason": self._reason,
            "total_duration": _nanoseconds(finished),
            "load_duration": 1,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - scheduled),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(finished - first),
        }


def timestamp(moment: datetime) -> str:
    """In the form of RFC 3339, in UTC."""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06d}Z"


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide counts by it."""
    return max(1, round(seconds * 1e9))
