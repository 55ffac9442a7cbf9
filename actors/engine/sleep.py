"""Pause and sleep. Tells admission, requests, scheduler and worker in the right order.

Not an actor: each call is a short conversation, led in the caller's own task. The resulting state is kept here and
published in the snapshot. While the engine sleeps, requests that do not wait are refused; requests that wait do so
until it wakes.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar, get_args

import anyio

from troupellm.actors.admission.admission import Admission
from troupellm.actors.engine.open_requests import OpenRequests
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import Conflict, EngineStopped, InvalidRequest, RequestAborted, TroupeError
from troupellm.protocol.messages.scheduler import (
    PausePlanning,
    ResetPrefixCache,
    ResumePlanning,
    SchedulerControl,
    SchedulerMessage,
    WriteOut,
)
from troupellm.protocol.messages.sleep import (
    EMPTY,
    PAUSED,
    WITHOUT_CACHE,
    CommandWorker,
    PauseMode,
    SleepReport,
    SleepWorker,
    WakeTag,
    WakeWorker,
    WorkerCommand,
    WorkerControl,
    WorkerReport,
)
from troupellm.protocol.messages.worker import StepPlan

logger = logging.getLogger("troupellm.engine")

Answer = TypeVar("Answer")

_PAUSE, _SLEEP, _COMMAND = "pause", "sleep", "command"
"""Reasons for standing still. The call that gave a reason takes it back, and planning goes on when none is left."""
_GIVEN_BACK: dict[int, tuple[WakeTag, ...]] = {
    PAUSED: ("scheduling",),
    WITHOUT_CACHE: ("scheduling", "kv_cache"),
    EMPTY: ("scheduling", "kv_cache", "weights"),
}


class PauseAndSleep:
    """Changes happen one after another; only `resume` may call off a pause that waits for requests to finish.

    `paused` and `level` are what was asked for last; see `SleepReport.level`.
    """

    def __init__(
        self,
        scheduler: Mailbox[SchedulerMessage, SchedulerControl],
        worker: Mailbox[StepPlan, WorkerControl],
        admission: Admission,
        requests: OpenRequests,
        error: Callable[[], TroupeError],
    ) -> None:
        """error: why nothing can be asked any more, once the engine has ended."""
        self._scheduler = scheduler
        self._worker = worker
        self._admission = admission
        self._requests = requests
        self._error = error
        self._reasons: set[str] = set()
        self._missing: set[WakeTag] = set()
        self._changing = anyio.Lock(fast_acquire=True)  # no task gets between a check and the lock
        self._waiters: set[Waiter] = set()
        self._finishing = False
        """A pause or a sleep waits for requests to finish."""
        self._over = self._ending = False
        self.level: int | None = None
        self.gives_back = True
        """The worker can give memory back."""

    @property
    def paused(self) -> bool:
        return _PAUSE in self._reasons

    @property
    def asleep(self) -> bool:
        """A sleep was carried out, and not all of it is undone."""
        return bool(self._missing)

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Compute nothing from when this returns. Being cancelled undoes it.

        Raises:
            InvalidRequest: there is no such mode.
            Conflict: another one waits for requests to finish, planning was resumed before they had, or they cannot
                since the engine stands still already.
            EngineStopped: the engine has ended.
        """
        _check_mode(mode)
        self._check_finishing()
        async with self._changing:
            await self._stand_still(_PAUSE, mode)
            if clear_cache:
                self._scheduler.control(ResetPrefixCache())

    def resume(self) -> None:
        """Compute again. Idempotent.

        Raises:
            Conflict: the engine sleeps.
        """
        if self.level is not None:
            raise Conflict("the engine sleeps: wake it instead", code="asleep")
        self._go_on(_PAUSE)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Compute nothing, and give memory back: 0 none, 1 the KV cache, 2 the weights too.

        Asleep already, it gives what is not given yet, and `mode` holds for those who wait.

        Raises:
            InvalidRequest: there is no such level or mode, or the worker cannot.
            Conflict: another one waits for requests to finish, or they cannot since the engine stands still already.
            EngineStopped: the engine has ended.
        """
        if level not in _GIVEN_BACK:
            raise InvalidRequest("level must be 0, 1 or 2", param="level")
        if level > PAUSED and not self.gives_back:  # before any request is aborted for it
            text = "an engine of several ranks gives no memory back yet; level 0 pauses it"
            raise InvalidRequest(text, param="level", code="sleep_unsupported")
        _check_mode(mode)
        self._check_finishing()
        async with self._changing:
            before = self.level
            self.level = level if before is None else max(before, level)
            self._admission.refusal = _asleep
            try:
                await self._stand_still(_SLEEP, mode)
                gives = level > PAUSED and not self._missing.issuperset(_GIVEN_BACK[level])
                report = await self._command(SleepWorker(level)) if gives else WorkerReport()
            except BaseException:
                self.level = before
                if before is None:
                    self._admission.refusal = None
                    self._go_on(_SLEEP)
                raise
            self._missing.update(_GIVEN_BACK[level])
            return _report(self.level, report)

    async def wake(self, tags: Iterable[WakeTag] | None = None) -> SleepReport:
        """Take back what the last sleep gave, or the part that is named; compute again when nothing is missing.

        Raises:
            InvalidRequest: there is no such tag.
            ModelLoadError: the weights cannot be read any more; the engine sleeps on.
            EngineStopped: the engine has ended.
        """
        wanted = set(get_args(WakeTag) if tags is None else tags)
        if not wanted <= set(get_args(WakeTag)):
            raise InvalidRequest(f"tags must be among {', '.join(get_args(WakeTag))}", param="tags")
        async with self._changing:
            if self.level is None:
                return SleepReport(level=None, rss_before=0, rss_after=0, seconds=0.0)
            report = WorkerReport()
            parts = wanted & self._missing & {"weights", "kv_cache"}
            if parts:
                report = await self._command(WakeWorker(weights="weights" in parts, kv_cache="kv_cache" in parts))
                self._missing -= parts
            if self._missing == {"scheduling"} and (self.level > PAUSED or "scheduling" in wanted):
                self._missing.clear()
            if not self._missing:
                self.level = None
                self._admission.refusal = None
                self._go_on(_SLEEP)
            return _report(self.level, report)

    async def command(self, command: WorkerCommand) -> WorkerReport:
        """Have the worker do something between two steps.

        Raises:
            Conflict: the engine sleeps, or waits for requests to finish.
            InvalidRequest: the worker refuses.
            EngineStopped: the engine has ended.
        """
        self._check_finishing()
        async with self._changing:
            if self.level is not None:
                raise Conflict("the engine sleeps: wake it first", code="asleep")
            try:
                await self._stand_still(_COMMAND, "keep")
                return await self._command(command)
            finally:
                self._go_on(_COMMAND)

    async def reset_cache(self, seconds: float, *, external: bool) -> bool:
        """Forget the prefix cache; wait so long for outer tiers, whether they have. See `Engine.reset_prefix_cache`.

        Raises:
            EngineStopped: the engine has ended.
        """
        answer: list[bool] = []
        async with self._waiting() as waiter:

            def done(ok: bool) -> None:
                answer.append(ok)
                waiter.wake()

            self._scheduler.control(ResetPrefixCache(external, done))
            await waiter.wait(seconds)
        return answer == [True]

    def send(self, message: SchedulerControl) -> None:
        """Hand the scheduler a message."""
        self._scheduler.control(message)

    async def ask(self, make: Callable[[Callable[[Answer], None]], SchedulerControl], seconds: float) -> Answer:
        """Hand the scheduler a message and wait for so long at most until it calls back.

        Args:
            make: the message that has this call back made.

        Raises:
            EngineStopped: the engine has ended, or the scheduler did not call back in time.
        """
        answers: list[Answer] = []
        async with self._waiting() as waiter:

            def done(answer: Answer) -> None:
                answers.append(answer)
                waiter.wake()

            self._scheduler.control(make(done))
            await waiter.wait(seconds)
        if answers:
            return answers[0]
        if self._over:
            raise self._error()
        raise EngineStopped(f"the scheduler did not answer within {seconds:g} seconds", code="server_is_overloaded")

    def call_off(self) -> None:
        """The engine ends: what is to come to a standstill hears that, also if there is nothing left that moves."""
        self._ending = True

    async def write_out(self, seconds: float) -> None:
        """For so long at most, until blocks that are to go to disk or to connectors are there, and resets carried out.

        Every request has ended before. Nothing is written while the engine sleeps so deeply that the worker's memory
        is gone. Planning goes on for it.
        """
        if self._over or (self.level is not None and self.level > PAUSED):
            return
        written: list[bool] = []
        async with self._waiting() as waiter:

            def done() -> None:
                written.append(True)
                waiter.wake()

            self._scheduler.control(WriteOut(done))
            await waiter.wait(seconds)
        if not written:
            logger.warning("KV blocks that waited to be written are lost: there was no more time")

    def end(self) -> None:
        """The engine has ended: every waiting call returns."""
        self._over = True
        for waiter in self._waiters:
            waiter.wake()

    async def _stand_still(self, reason: str, mode: PauseMode) -> None:
        """Until no plan is in flight, and none follows. If it fails, a reason that stood before still stands."""
        if self._ending:
            raise self._error()
        settled: list[bool] = []
        stood = reason in self._reasons
        self._reasons.add(reason)
        try:
            async with self._waiting() as waiter:

                def settle(still: bool) -> None:
                    settled.append(still)
                    waiter.wake()

                self._scheduler.control(PausePlanning(mode == "wait", settle))
                if mode == "abort":
                    self._requests.end_all(_aborted, by="admin")
                self._finishing = mode == "wait"
                try:
                    await waiter.wait()
                finally:
                    self._finishing = False
            if not settled or self._ending:
                raise self._error()
            if reason not in self._reasons:
                raise Conflict("the engine was resumed before it stood still", code="resumed")
            if not settled[0]:
                raise Conflict(
                    "the engine stands still, so its requests cannot finish: let it go on first, or use another mode",
                    code="standing_still",
                )
        except BaseException:
            if not stood:
                self._go_on(reason)
            raise

    def _check_finishing(self) -> None:
        if self._finishing:
            raise Conflict("requests finish before the engine rests: come back then, or end them", code="pausing")

    def _go_on(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.discard(reason)
            if not self._reasons:
                self._scheduler.control(ResumePlanning())

    async def _command(self, command: WorkerCommand) -> WorkerReport:
        """Nothing is half done when the caller is cancelled: what was begun ends first."""
        answer: list[tuple[WorkerReport | None, Exception | None]] = []
        with anyio.CancelScope(shield=True):
            async with self._waiting() as waiter:

                def done(report: WorkerReport | None, error: Exception | None) -> None:
                    answer.append((report, error))
                    waiter.wake()

                self._worker.control(CommandWorker(command, done))
                await waiter.wait()
        if not answer:
            raise self._error()
        report, error = answer[0]
        if error is not None:
            raise error
        assert report is not None
        return report

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[Waiter]:
        """A waiter that the engine's end wakes too."""
        if self._over:
            raise self._error()
        waiter = new_waiter()
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise InvalidRequest(f"mode must be one of {', '.join(get_args(PauseMode))}", param="mode")


def _report(level: int | None, report: WorkerReport) -> SleepReport:
    return SleepReport(level=level, rss_before=report.rss_before, rss_after=report.rss_after, seconds=report.seconds)


def _asleep() -> EngineStopped:
    return EngineStopped("the engine sleeps", code="asleep")


def _aborted() -> RequestAborted:
    return RequestAborted("the request was ended by an administrator")
