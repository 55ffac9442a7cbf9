"""The open requests of an API process: an outbox for each, filled from the frames of the engine's process."""

from collections.abc import Callable
from itertools import count

from troupellm.actors.engine.api_process_session import api_process_budget
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.config.engine import StreamConfig
from troupellm.protocol.errors import EngineStopped, TroupeError
from troupellm.protocol.messages.scheduler import AbortRequest, ReaderPaused, ReaderResumed, SchedulerControl
from troupellm.protocol.params.outputs import Delta
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import Abort, Chunks, Ended, FromApiProcess, PauseReader, ResumeReader


class _NoSlot:
    """The place is taken up in the engine's process."""

    def tokenized(self, tokens: int) -> None: ...

    def scheduled(self) -> None: ...

    def leave(self) -> None: ...


class OpenRequest:
    __slots__ = ("admitted", "answered", "invalid", "outbox", "prompt")

    def __init__(self, outbox: LocalOutbox) -> None:
        self.outbox = outbox
        self.prompt: tuple[int, ...] = ()
        self.admitted = False
        self.invalid = False
        self.answered: Waiter = new_waiter()
        """Woken once it is clear whether it gets a place."""


class OpenRequests:
    """By number. A request leaves when its outbox ends."""

    def __init__(self, stream: StreamConfig, post: Callable[[FromApiProcess], None], clock: Clock) -> None:
        """post: queues a message for the engine's process, without waiting."""
        self._stream = stream
        self._post = post
        self._clock = clock
        self._numbers = count(1)
        self._open: dict[int, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def new(self, *, streaming: bool) -> OpenRequest:
        number = next(self._numbers)
        outbox = LocalOutbox(
            number,
            arrival=self._clock.now(),
            slot=_NoSlot(),
            clock=self._clock,
            budget=api_process_budget(self._stream) if streaming else None,
            to_scheduler=self._control,
            on_terminal=self._forget,
        )
        request = self._open[number] = OpenRequest(outbox)
        return request

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)

    def admit(self, number: int, quota: Quota | None) -> None:
        """It has a place in the engine."""
        if (request := self._open.get(number)) is not None:
            request.outbox.quota = quota
            request.admitted = True
            request.answered.wake()

    def deliver(self, message: Chunks) -> None:
        requests = self._open
        touched: dict[int, LocalOutbox] = {}
        for number in message.opened:
            if (request := requests.get(number)) is not None:
                request.outbox.opened(request.prompt)
        for prompt in message.prompts:
            if (request := requests.get(prompt.request)) is not None:
                request.outbox.prompt_logprobs(prompt.entries)
        for chunk in message.chunks:
            request = requests.get(chunk.request)
            if request is None:
                continue
            delta = Delta(
                index=chunk.index,
                text=chunk.text,
                token_ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                finish_reason=chunk.finish_reason,
                stop_reason=chunk.stop_reason,
            )
            request.outbox.push(delta)
            touched[chunk.request] = request.outbox
        for outbox in touched.values():
            outbox.wake()
        for end in message.ended:
            self.end(end)

    def end(self, message: Ended) -> None:
        if message.error is not None:
            self._finish(message.request, message.error.error())
        elif (request := self._open.get(message.request)) is not None and message.usage is not None:
            arrival, timing = request.outbox.arrival, message.timing
            times = (None if time is None else arrival + time for time in (timing.scheduled, timing.first_token))
            if message.pooled is not None:
                request.outbox.pooled(message.pooled)
            request.outbox.close(message.usage, *times)

    def _finish(self, number: int, error: TroupeError) -> None:
        request = self._open.get(number)
        if request is not None:
            request.outbox.fail(error)
            request.answered.wake()

    def lost(self) -> None:
        """The engine's process is gone: every request ends with an error."""
        for number in list(self._open):
            self._finish(number, EngineStopped("the engine's process has ended", code="engine_failed"))

    def _control(self, message: SchedulerControl) -> None:
        """Pass an outbox's control message to the engine's process."""
        match message:
            case AbortRequest(request=number):
                known = self._open.get(number)
                self._post(Abort(number, invalid=known is not None and known.invalid))
            case ReaderPaused(request=number):
                self._post(PauseReader(number))
            case ReaderResumed(request=number):
                self._post(ResumeReader(number))
            case _:
                raise AssertionError(f"an outbox does not say {message}")
