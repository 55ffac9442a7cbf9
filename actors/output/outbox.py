"""The outbox: one request's slot between the output actor and its reader, both on one event loop.

Pieces merge per sequence while they wait. A streaming reader who falls more than its budget of tokens behind pauses its
own sequences; they go on when half of the budget is free again. Nothing here ever blocks the output actor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.scheduler import AbortRequest, ReaderPaused, ReaderResumed, SchedulerControl
from troupellm.protocol.params.outputs import Delta, Timing, TokenLogprob, Usage
from troupellm.protocol.quota import Quota


class RequestSlot(Protocol):
    """Notifications of an outbox to the place that its request takes up."""

    def tokenized(self, tokens: int) -> None: ...

    def scheduled(self) -> None: ...

    def leave(self) -> None: ...


class Sink(Protocol):
    """Takes pieces as they come, without a task that waits for them."""

    def ready(self) -> bool:
        """Whether it takes pieces now. Must not wait."""

    def take(self, deltas: list[Delta]) -> None:
        """Must not wait either."""


class LocalOutbox:
    """Implements `protocol.output.Outbox`.

    `budget` is in tokens; None means that no reader takes pieces before the end: nothing pauses, and only the end
    wakes.
    """

    def __init__(
        self,
        request: int,
        *,
        arrival: float,
        slot: RequestSlot,
        clock: Clock,
        budget: int | None,
        to_scheduler: Callable[[SchedulerControl], None],
        on_terminal: Callable[[int], None],
        on_abort: Callable[[], None] = lambda: None,
        on_wake: Callable[["LocalOutbox"], None] | None = None,
    ) -> None:
        """`on_wake` is called beside the waking of who waits: for one reader of many outboxes."""
        self.request = request
        self.prompt_token_ids: tuple[int, ...] | None = None
        self.logprobs_of_prompt: tuple[TokenLogprob | None, ...] | None = None
        self.vector: bytes | None = None
        """The pooled vector, float32."""
        self.usage: Usage | None = None
        self.spent: Usage | None = None
        """The tokens of a request that failed, where they are known."""
        self.quota: Quota | None = None
        """The remaining limits of the request's tenant."""
        self.timing = Timing()
        self.error: TroupeError | None = None
        self.terminal = False
        self.cancelled = False
        self.started = False
        self.paused_since: float | None = None
        self.arrival = arrival
        self._slot = slot
        self._clock = clock
        self.streams = budget is not None
        self._budget: float = math.inf if budget is None else budget
        self._to_scheduler = to_scheduler
        self._on_terminal = on_terminal
        self._on_abort = on_abort
        self._on_wake = on_wake
        self._pending: dict[int, list[Delta]] = {}
        self._apart = False
        self._sink: Sink | None = None
        self.sink_failure: Exception | None = None
        """The exception that a sink raised, for its reader."""
        self._undelivered = 0
        self._waiters: list[Waiter] = []
        self._watchers: list[Callable[[], None]] = []

    # From the output actor.

    def keep_apart(self) -> None:
        self._apart = True

    def opened(self, prompt_token_ids: tuple[int, ...]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self._slot.tokenized(len(prompt_token_ids))
        if self.cancelled or self.terminal:
            self._to_scheduler(AbortRequest(self.request))
        self._wake_readers()

    def push(self, delta: Delta) -> None:
        pieces = self._pending.get(delta.index)
        if pieces is None:
            if (not self.started or self.cancelled or self.terminal) and not self._accepts(delta):
                return
            self._pending[delta.index] = [delta]
        else:
            pieces.append(delta)
        self._undelivered += len(delta.token_ids)
        if self._undelivered > self._budget and self.paused_since is None:
            self.paused_since = self._clock.now()
            self._to_scheduler(ReaderPaused(self.request))

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None]) -> None:
        self.logprobs_of_prompt = (*(self.logprobs_of_prompt or ()), *entries)

    def pooled(self, vector: bytes) -> None:
        if not self.started:
            self.started = True
            self._slot.scheduled()
        self.vector = vector

    def close(self, usage: Usage, scheduled: float | None, first_token: float | None) -> None:
        if self.terminal:
            return
        self.usage = usage
        self.timing = Timing(
            scheduled=None if scheduled is None else scheduled - self.arrival,
            first_token=None if first_token is None else first_token - self.arrival,
            finished=self._clock.now() - self.arrival,
        )
        self._end()

    def fail(self, error: TroupeError, spent: Usage | None = None) -> None:
        if self.terminal:
            return
        self.error, self.spent = error, spent
        self._end()

    def wake(self) -> None:
        if self.streams and not (self._sink is not None and self._pour(self._sink)):
            self._wake_readers()

    def _pour(self, sink: Sink) -> bool:
        """Give a sink what waits; False where the task that waits must read it."""
        try:
            if not self.can_write_directly or not sink.ready():
                return False
            sink.take(self.take_all())
        except Exception as error:  # the reader's, not the output actor's, which calls this
            self.sink_failure = error
            self._sink = None
            return False
        return True

    # From the reader.

    def set_sink(self, sink: Sink) -> None:
        """Give pieces to `sink` while it is ready, and otherwise wake the task that waits, which costs as much again as
        a send. Pieces that end a sequence always wait for the task."""
        self._sink = None if self.terminal or self.cancelled else sink

    @property
    def can_write_directly(self) -> bool:
        """Pieces wait, and none of them ends its sequence."""
        if self.terminal or not self._pending:
            return False
        for pieces in self._pending.values():
            for piece in pieces:
                if piece.finish_reason is not None:
                    return False
        return True

    @property
    def waiting(self) -> bool:
        """Whether pieces wait to be taken."""
        return bool(self._pending)

    def take(self) -> Delta | None:
        """The next piece, if there is one: all that a sequence has, unless pieces are kept apart."""
        if not self._pending:
            return None
        index = next(iter(self._pending))
        pieces = self._pending.pop(index)
        if self._apart and len(pieces) > 1:
            delta = pieces[0]
            self._pending[index] = pieces[1:]
        else:
            delta = pieces[0] if len(pieces) == 1 else _merged(index, pieces)
        self._undelivered -= len(delta.token_ids)
        if self.paused_since is not None and self._undelivered <= self._budget / 2:
            self.paused_since = None
            if not self.terminal:
                self._to_scheduler(ReaderResumed(self.request))
        return delta

    def take_all(self) -> list[Delta]:
        """All pieces that wait; at most one per sequence, unless pieces are kept apart."""
        taken: list[Delta] = []
        while self._pending and (delta := self.take()) is not None:
            taken.append(delta)
        return taken

    async def wait(self, timeout: float | None = None) -> bool:
        """Until the next wake; False after `timeout` seconds."""
        waiter = new_waiter()
        self._waiters.append(waiter)
        try:
            return await waiter.wait(timeout)
        finally:
            if waiter in self._waiters:  # it was not woken
                self._waiters.remove(waiter)

    def when_terminal(self, call: Callable[[], None]) -> None:
        """Call back at the end, or now if it is over."""
        if self.terminal:
            call()
        else:
            self._watchers.append(call)

    def abort(self) -> None:
        """The reader wants nothing more. May be repeated; the request is over when `terminal` is set."""
        if not (self.cancelled or self.terminal):
            self._on_abort()
        self.cancelled = True
        self._sink = None
        self._pending.clear()
        self._undelivered = 0
        self.paused_since = None
        if not self.terminal:
            self._to_scheduler(AbortRequest(self.request))

    def _accepts(self, delta: Delta) -> bool:
        """Checked when nothing waits for the reader, which an abort sees to."""
        if not self.started:
            self.started = True
            self._slot.scheduled()
        if not (self.cancelled or self.terminal):
            return True
        if delta.finish_reason is None:  # the scheduler met the abort before it met the request: say it again
            self._to_scheduler(AbortRequest(self.request))
        return False

    def _end(self) -> None:
        self.terminal = True
        self._sink = None  # which holds the reader, who holds this
        self._slot.leave()
        self._on_terminal(self.request)
        self._wake_readers()
        watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    def _wake_readers(self) -> None:
        if self._on_wake is not None:
            self._on_wake(self)
        for waiter in self._waiters:
            waiter.wake()
        self._waiters.clear()


def _merged(index: int, pieces: list[Delta]) -> Delta:
    last = pieces[-1]
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return Delta(
        index=index,
        text="".join([piece.text for piece in pieces]),
        token_ids=tuple([token_id for piece in pieces for token_id in piece.token_ids]),
        logprobs=tuple(logprobs) if logprobs else pieces[0].logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
