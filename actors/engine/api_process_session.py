"""One API process, as the engine's process sees it: its requests on their way in, and their answers out.

Requests are admitted here, before the API process tokenizes them, so that the caps hold for all API processes together.
An API process that ends loses exactly its own requests.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import assert_never

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from troupellm.actors.engine.api_process_outgoing import Outgoing, Sent
from troupellm.actors.engine.submit import charge, count_rejection, hand_over, take_slot
from troupellm.actors.engine.system import System
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.config.engine import StreamConfig
from troupellm.protocol.errors import RequestAborted, RequestFailed, TroupeError
from troupellm.protocol.messages.input import Submission, TokensPrompt
from troupellm.protocol.wire.api_process import (
    Abort,
    Admitted,
    Apply,
    AskCharge,
    ChargeAnswer,
    Chunks,
    CorrectCharge,
    Ended,
    PauseReader,
    ResumeReader,
    Submit,
    WireError,
)

ApiProcessRequest = Apply | Submit | Abort | PauseReader | ResumeReader | AskCharge | CorrectCharge
Answer = Admitted | Ended | Chunks | ChargeAnswer
_LET_GO_SECONDS = 5.0
_FIRST_REPEAT_SECONDS = 0.02


class _Request:
    """From `Apply` to `Ended`."""

    __slots__ = ("apply", "held", "invalid", "scope", "sent", "submit", "submitted")

    def __init__(self, apply: Apply) -> None:
        self.apply = apply
        self.scope = anyio.CancelScope()
        """Around its way in."""
        self.invalid = False
        """The API process has refused it."""
        self.held = False
        """Its reader is paused: it had read much of the request from another engine."""
        self.submit: Submit | None = None
        self.submitted: Waiter = new_waiter()
        self.sent: Sent | None = None
        """Once it was handed over."""


class ApiProcessSession:
    """`handle` takes what the API process says, `run` sends what the engine answers."""

    def __init__(
        self,
        system: System,
        clock: Clock,
        config: StreamConfig,
        *,
        post: Callable[[Answer], None],
        drained: Callable[[], Awaitable[None]],
        part_seconds: float | None = None,
    ) -> None:
        """
        Args:
            post: queues a message for the API process, without waiting.
            drained: waits while much is queued; chunks merge meanwhile.
            part_seconds: so often an answer that is not streamed is told as far as it is there; None: at its end only.
        """
        self._system = system
        self._clock = clock
        self._config = engine_half(config)
        self._post = post
        self._drained = drained
        self._part_seconds = part_seconds
        self._requests: dict[int, _Request] = {}
        self._applied: list[_Request] = []
        self._outgoing = Outgoing()
        self._writer: Waiter | None = None
        self._newcomers: Waiter | None = None

    def __len__(self) -> int:
        """Open requests of the API process."""
        return len(self._requests)

    def handle(self, message: ApiProcessRequest) -> None:
        match message:
            case Apply():
                if message.request in self._requests:
                    raise ValueError(f"the front used the number {message.request} twice")
                request = self._requests[message.request] = _Request(message)
                self._applied.append(request)
                if self._newcomers is not None:
                    self._newcomers.wake()
            case Submit():
                if (known := self._requests.get(message.request)) is not None:
                    known.submit = message
                    known.submitted.wake()
            case Abort():
                self._abort(message.request, invalid=message.invalid)
            case PauseReader():
                self._hold(message.request, held=True)
            case ResumeReader():
                self._hold(message.request, held=False)
            case AskCharge(query=query, tenant=tenant, tokens=tokens):
                try:
                    answer = ChargeAnswer(query=query, quota=charge(self._system, tenant, tokens))
                except TroupeError as error:
                    answer = ChargeAnswer(query=query, error=WireError.of(error))
                self._post(answer)
            case CorrectCharge(tenant=tenant, tokens=tokens, requests=requests):
                self._system.admission.quotas.change(tenant, tokens=tokens, requests=requests)
            case _:
                assert_never(message)

    async def run(self) -> None:
        """Until cancelled; then the API process's requests are ended, within a bound."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write)
                if self._part_seconds is not None:
                    group.start_soon(self._tell_parts, self._part_seconds)
                while True:
                    applied, self._applied = self._applied, []
                    for request in applied:
                        group.start_soon(self._enter, request)
                    if not self._applied:
                        self._newcomers = new_waiter()
                        await self._newcomers.wait()
                        self._newcomers = None
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LET_GO_SECONDS):
                await self._let_go()

    async def _enter(self, request: _Request) -> None:
        """One request's way in: a place, the prepared prompt from the API process, the engine."""
        number = request.apply.request
        error: TroupeError = RequestAborted("the request was ended before it began")
        with request.scope:
            try:
                await self._bring_in(request)
                if request.scope.cancel_called:  # it came when there was nothing left to wait for, so it ended nothing
                    self._abort(number)
                return
            except TroupeError as raised:
                error = raised
        if request.sent is None and self._requests.pop(number, None) is not None:
            if request.invalid:
                count_rejection(self._system, "invalid")
            self._post(Ended(request=number, error=WireError.of(error)))

    async def _bring_in(self, request: _Request) -> None:
        apply, handed_over = request.apply, False
        expires = not apply.moved
        slot = await take_slot(self._system, apply.demand, wait=apply.wait, deadline=apply.deadline, expires=expires)
        try:
            self._post(Admitted(apply.request, slot.quota))
            await request.submitted.wait()
            assert request.submit is not None
            submission = _submission(request.apply, request.submit)
            handed_over = True  # the outbox leaves the place from here on
            on_wake = partial(self._on_wake, request)
            outbox = await hand_over(
                self._system, self._config, slot, apply.arrival, submission, on_wake, expires=expires
            )
            self._on_wake(request, outbox)
        finally:
            if not handed_over:
                slot.leave()

    def _on_wake(self, request: _Request, outbox: LocalOutbox) -> None:
        """The output actor, or who else ends requests, has something for the reader."""
        if request.sent is None:
            request.sent = Sent(request.apply.request, outbox)
            request.sent.held = request.held
        self._mark(request.sent)

    def _mark(self, sent: Sent) -> None:
        self._outgoing.mark(sent)
        if self._writer is not None:
            self._writer.wake()

    def _abort(self, number: int, *, invalid: bool = False) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        if request.sent is None:
            request.invalid = request.invalid or invalid
            request.scope.cancel()
            return
        request.sent.held = False
        request.sent.backlog.clear()
        request.sent.outbox.abort()
        self._mark(request.sent)

    def _hold(self, number: int, *, held: bool) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        request.held = held
        if request.sent is not None:
            request.sent.held = held
            if not held:
                self._mark(request.sent)

    async def _write(self) -> None:
        while True:
            await self._drained()
            frame = self._outgoing.collect()
            if frame is not None:
                for end in frame.ended:
                    del self._requests[end.request]
                self._post(frame)
                await checkpoint()
            elif self._outgoing.empty:
                self._writer = new_waiter()
                await self._writer.wait()
                self._writer = None

    async def _tell_parts(self, seconds: float) -> None:
        """The other side keeps the parts: another engine continues the answer behind them if this one dies."""
        while True:
            await anyio.sleep(seconds)
            for request in self._requests.values():
                if (sent := request.sent) is not None and not sent.outbox.streams and sent.outbox.waiting:
                    self._mark(sent)

    async def _let_go(self) -> None:
        """Abort the open requests, which have no reader any more. Aborts are repeated, since one that overtakes its
        request on the way to the scheduler is lost."""
        pause = _FIRST_REPEAT_SECONDS
        while open_outboxes := [
            request.sent.outbox
            for request in self._requests.values()
            if request.sent is not None and not request.sent.outbox.terminal
        ]:
            for outbox in open_outboxes:
                outbox.abort()
            await open_outboxes[0].wait(pause)
            pause *= 2
        self._requests.clear()


def engine_half(config: StreamConfig) -> StreamConfig:
    """The budget of undelivered tokens is shared by both sides of the socket."""
    return msgspec.structs.replace(config, stream_budget_tokens=max(1, config.stream_budget_tokens // 2))


def api_process_budget(config: StreamConfig) -> int:
    return max(1, config.stream_budget_tokens - config.stream_budget_tokens // 2)


def _submission(apply: Apply, submit: Submit) -> Submission:
    if len(submit.prompt) % 4:
        raise RequestFailed("the prompt is no list of token ids")
    return Submission(
        request_id=submit.request_id,
        prompt=TokensPrompt(
            memoryview(submit.prompt).cast("i").tolist(),
            segment=submit.segment,
            truncated=submit.truncated,
            leases=submit.leases,
        ),
        params=submit.params,
        wait=apply.wait,
        tenant=apply.demand.tenant,
        request_group=apply.demand.request_group,
        cache_salt=submit.cache_salt,
        deadline=apply.deadline,
        streaming=submit.streaming,
        pooling=submit.pooling,
        hints=submit.hints,
        adapter=submit.adapter,
        generated=submit.generated,
    )
