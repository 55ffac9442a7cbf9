"""A chat request as its caller reads it: parsed pieces of each choice, or whole parsed choices.

Without a chat syntax a delta's text is content as it is, at the cost of two small objects.
"""

from collections.abc import Callable
from typing import Self

import msgspec

from troupellm.actors.client.stream import Stream
from troupellm.actors.client.whole_answers import read_completion, was_cut
from troupellm.actors.output.outbox import Sink
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.reasoning_tokens import ReasoningCount
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.protocol.errors import RequestAborted
from troupellm.protocol.params.chat_events import (
    Content,
    Finished,
    ParsedPiece,
    Reasoning,
    TurnChoice,
    TurnEvent,
    TurnReason,
)
from troupellm.protocol.params.outputs import Completion, CompletionChoice, Delta, FinishReason, Message, Timing, Usage
from troupellm.protocol.quota import Quota


class ChatTurn:
    """Iterates over lists of events, one list per wake of the stream."""

    def __init__(
        self,
        stream: Stream,
        sequences: int,
        chat_parser: ChatParser | None = None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """
        Args:
            sequences: how many choices there will be.
            chat_parser: how to read them; None shows the text as it is.
            on_tokens: hears how many tokens each list of events has.
        """
        self._stream = stream
        self._left = sequences
        self._chat_parser = chat_parser
        self._on_tokens = on_tokens
        self.called = False
        """A choice has ended in tool calls."""
        self._readers: dict[int, tuple[Parser, ReasoningCount | None]] = {}
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
        if not self._readers:
            return usage
        return msgspec.structs.replace(usage, reasoning_tokens=self.reasoning_tokens)

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens so far, those that were reasoning."""
        return sum([count.tokens for _, count in self._readers.values() if count is not None])

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
        """The events of one wake, never empty.

        The events after which no choice is left come together with `ended`, so that they can travel with the end of
        the response.

        Raises:
            TroupeError: the request failed.
        """
        while not self.ended:
            deltas = await self._stream.wake()
            if deltas is None:
                break
            events = self.events(deltas)
            if self._left <= 0:
                async for rest in self._stream:
                    events += self.events([rest])
                self.ended = True
            if events:
                return events
        raise StopAsyncIteration

    def set_sink(self, sink: Sink) -> None:
        """See `Stream.set_sink`. The sink asks `events` what its pieces say."""
        self._stream.set_sink(sink)

    async def collect(self) -> "TurnAnswer":
        """The whole answer.

        Raises:
            TroupeError: the request failed.
        """
        completion = await self._stream.collect()
        if not self._stream.is_chat:
            completion = await read_completion(completion, self._chat_parser)
        self.ended = True
        choices = tuple([_turn_choice(choice) for choice in completion.choices])
        self.called = any(choice.finish_reason == "tool_calls" for choice in choices)
        return TurnAnswer(completion, choices)

    def events(self, deltas: list[Delta]) -> list[TurnEvent]:
        """The events of pieces of the stream, in their order; there may be none."""
        events: list[TurnEvent] = []
        tokens = 0
        for delta in deltas:
            tokens += len(delta.token_ids)
            called = False
            if self._chat_parser is not None:
                called = self._parse(delta, self._chat_parser, events)
            elif delta.text or delta.token_ids:
                events.append(TurnEvent(delta.index, Content(delta.text), delta.token_ids, delta.logprobs))
            if delta.finish_reason is not None:
                self._left -= 1
                reason = turn_reason(delta.finish_reason, called=called)
                self.called = self.called or reason == "tool_calls"
                events.append(TurnEvent(delta.index, Finished(reason, delta.stop_reason)))
        self._on_tokens(tokens)
        return events

    def _reader(self, chat_parser: ChatParser) -> tuple[Parser, ReasoningCount | None]:
        prompt = self._stream.prompt_token_ids
        return chat_parser.new_parser(prompt), chat_parser.new_count(prompt)

    def _parse(self, delta: Delta, chat_parser: ChatParser, events: list[TurnEvent]) -> bool:
        """Add what a delta says; tells whether its choice has called a tool, and wholly."""
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._reader(chat_parser)
        parser, count = reader
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish(cut=was_cut(delta.finish_reason, delta.stop_reason))
        if count is not None:
            count.add(delta.token_ids, "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)]))
        shown = pieces if chat_parser.show_reasoning else _without_reasoning(pieces)
        ids, logprobs = delta.token_ids, delta.logprobs
        if not shown and ids:
            events.append(TurnEvent(delta.index, Content(""), ids, logprobs))
        for piece in shown:
            events.append(TurnEvent(delta.index, piece, ids, logprobs))
            ids, logprobs = (), None
        return parser.has_whole_calls


def _without_reasoning(pieces: list[ParsedPiece]) -> list[ParsedPiece]:
    return [piece for piece in pieces if not isinstance(piece, Reasoning)]


def _turn_choice(choice: CompletionChoice) -> TurnChoice:
    message = choice.message or Message(content=choice.text)
    return TurnChoice(
        index=choice.index,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        finish_reason=turn_reason(choice.finish_reason, called=bool(message.tool_calls) and message.calls_whole),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
    )


class TurnAnswer:
    """The result of `ChatTurn.collect`: the choices, and the completion that they were parsed from."""

    def __init__(self, completion: Completion, choices: tuple[TurnChoice, ...]) -> None:
        self.completion = completion
        self.choices = choices

    @property
    def usage(self) -> Usage:
        return self.completion.usage


def turn_reason(reason: FinishReason | None, *, called: bool) -> TurnReason:
    """The finish reason as clients may see it.

    Args:
        called: tools were called, and the last call has all its arguments.

    Raises:
        RequestAborted: the server ended the sequence, which is an error and never a normal end.
    """
    if reason is None or reason == "abort":
        raise RequestAborted("the request was ended by the server")
    return "tool_calls" if called and reason == "stop" else reason
