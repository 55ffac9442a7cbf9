"""A chat request as its caller reads it: parsed pieces of each choice, or whole parsed choices.

Without a dialect a delta's text is content as it is, at the cost of two small objects.
"""

from collections.abc import Callable
from typing import Protocol, Self

from troupellm.actors.stream import Stream
from troupellm.protocol.dialect import (
    Content,
    Finished,
    ParsedPiece,
    ToolCall,
    TurnChoice,
    TurnEvent,
    TurnReason,
    assemble,
)
from troupellm.protocol.errors import RequestAborted
from troupellm.protocol.outputs import Completion, CompletionChoice, Delta, FinishReason, Timing, Usage
from troupellm.protocol.quota import Quota


class ChoiceParser(Protocol):
    """Follows the text of one choice. No text makes it raise."""

    @property
    def has_calls(self) -> bool: ...

    def feed(self, text: str) -> list[ParsedPiece]: ...

    def finish(self) -> list[ParsedPiece]:
        """What was held back; the text has ended."""


class Turn:
    """Iterates over lists of events, one list per wake of the stream."""

    def __init__(self, stream: Stream, sequences: int, new_parser: Callable[[], ChoiceParser] | None = None) -> None:
        """
        Args:
            sequences: how many choices there will be.
            new_parser: makes the parser of each choice; None shows the text as it is.
        """
        self._stream = stream
        self._left = sequences
        self._new_parser = new_parser
        self._parsers: dict[int, ChoiceParser] = {}
        self.ended = False
        """Every choice has finished, and `usage` is known: nothing follows the events that were last given."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Empty until the request was opened."""
        return self._stream.prompt_token_ids

    @property
    def usage(self) -> Usage:
        """Known once `ended`, or after `collect`."""
        usage = self._stream.usage
        assert usage is not None, "a turn that ended without an error has usage"
        return usage

    @property
    def timing(self) -> Timing:
        return self._stream.timing

    @property
    def quota(self) -> Quota | None:
        return self._stream.quota

    async def opened(self) -> None:
        """Return once the request is validated and queued.

        Raises:
            TroupeError: it was refused.
        """
        await self._stream.opened()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TurnEvent]:
        """What one wake brings, never empty.

        The events after which no choice is left come together with `ended`, so that they can travel with the end of
        the response.

        Raises:
            TroupeError: the request failed.
        """
        while not self.ended:
            deltas = [await anext(self._stream), *self._stream.take_ready()]
            events = self._events(deltas)
            if self._left <= 0:
                async for rest in self._stream:
                    events += self._events([rest])
                self.ended = True
            if events:
                return events
        raise StopAsyncIteration

    async def collect(self) -> "TurnAnswer":
        """The whole answer.

        Raises:
            TroupeError: the request failed.
        """
        completion = await self._stream.collect()
        self.ended = True
        return TurnAnswer(completion, tuple([self._whole(choice) for choice in completion.choices]))

    def _events(self, deltas: list[Delta]) -> list[TurnEvent]:
        events: list[TurnEvent] = []
        for delta in deltas:
            if self._new_parser is None:
                if delta.text or delta.token_ids:
                    events.append(TurnEvent(delta.index, Content(delta.text), delta.token_ids, delta.logprobs))
                called = False
            else:
                called = self._parse(delta, self._new_parser, events)
            if delta.finish_reason is not None:
                self._left -= 1
                reason = turn_reason(delta.finish_reason, called=called)
                events.append(TurnEvent(delta.index, Finished(reason, delta.stop_reason)))
        return events

    def _parse(self, delta: Delta, new_parser: Callable[[], ChoiceParser], events: list[TurnEvent]) -> bool:
        """Add what a delta says; tells whether its choice has called a tool."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = new_parser()
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        if not pieces and delta.token_ids:
            pieces.append(Content(""))
        ids, logprobs = delta.token_ids, delta.logprobs
        for piece in pieces:
            events.append(TurnEvent(delta.index, piece, ids, logprobs))
            ids, logprobs = (), None
        return parser.has_calls

    def _whole(self, choice: CompletionChoice) -> TurnChoice:
        content: str | None = choice.text
        reasoning: str | None = None
        calls: tuple[ToolCall, ...] = ()
        if self._new_parser is not None:
            parser = self._new_parser()
            content, reasoning, calls = assemble(parser.feed(choice.text) + parser.finish())
        return TurnChoice(
            index=choice.index,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=turn_reason(choice.finish_reason, called=bool(calls)),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
        )


class TurnAnswer:
    """What `Turn.collect` gives: the choices, and the completion that they were parsed from."""

    def __init__(self, completion: Completion, choices: tuple[TurnChoice, ...]) -> None:
        self.completion = completion
        self.choices = choices

    @property
    def usage(self) -> Usage:
        return self.completion.usage


def turn_reason(reason: FinishReason | None, *, called: bool) -> TurnReason:
    """The finish reason as clients may see it.

    Raises:
        RequestAborted: the server ended the sequence, which is an error and never a normal end.
    """
    if reason is None or reason == "abort":
        raise RequestAborted("the request was ended by the server")
    return "tool_calls" if called and reason == "stop" else reason
