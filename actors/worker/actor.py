"""Worker actor: carries plans to the worker's host and results back, and brings a worker back that was lost.

Owns:      the plans in flight and the count of losses; the model lives in the host.
Receives:  StepPlan (as many as the scheduler has credits); on the control lane RestartWorker and CommandWorker.
Sends:     StepFinished to the scheduler, by offer: a scheduler without room for a result it asked for is a bug.
           On its control lane WorkerLost at once when a step fails, and WorkerBack when there is a worker again;
           WorkerAsleep and WorkerBack around a sleep.
On crash:  the engine fails with the root cause, and every open request with it. So it does when the worker is lost
           more often than its intensity allows without finishing a step.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, assert_never

import anyio
from anyio.abc import TaskStatus

from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.restart_intensity import Crashes, Intensity
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.actors.worker.thread_host import WorkerGone, WorkerHost, WorkerStuck, found_no_memory
from troupellm.protocol.errors import InvalidRequest, TroupeError, WeightsChanged
from troupellm.protocol.messages.scheduler import StepFinished, WorkerAsleep, WorkerLost, WorkerRestarted
from troupellm.protocol.messages.sleep import (
    WITHOUT_CACHE,
    CommandWorker,
    SleepWorker,
    WakeWorker,
    WorkerControl,
    WorkerReport,
)
from troupellm.protocol.messages.worker import RestartWorker, StepPlan, StepResult, WorkerReady

logger = logging.getLogger("troupellm.engine")

LOOK_SECONDS = 1.0
STOPPED_LOOKS = 2
"""A worker that is still stopped so many looks after it was first seen so is given up."""
_FIRST_PAUSE_SECONDS = 0.05
"""Before a restart that follows one which failed; doubles each time."""
_LONGEST_PAUSE_SECONDS = 5.0


class ResultSink(Protocol):
    """The scheduler's mailbox."""

    def offer(self, message: StepFinished) -> bool: ...
    def control(self, message: WorkerLost | WorkerRestarted | WorkerAsleep) -> None: ...


class WorkerActor:
    """Publishes `last_step`, when a step last finished, and `busy_since`, when the one under way began (both in seconds
    on the clock, or None), `losses`, `num_dropped` plans for workers that were lost, and `restarting`: why there is no
    worker right now, or None. `asleep`: its memory was given back, by request; `num_sleeps`: how many of the losses
    were that; `executing`: a command is being executed."""

    def __init__(
        self,
        inbox: Mailbox[StepPlan, WorkerControl],
        scheduler: ResultSink,
        worker_host: WorkerHost,
        clock: Clock,
        step_timeout: float | None = None,
        intensity: Intensity | None = None,
    ) -> None:
        """step_timeout: seconds after which a step counts as hung. intensity: of losses without a finished step."""
        self._inbox = inbox
        self._scheduler = scheduler
        self._worker_host = worker_host
        self._clock = clock
        self._timeout = step_timeout
        self._crashes = Crashes(intensity or Intensity(), clock)
        self._num_answers = 0
        """Of the present worker, without one that the scheduler has refused."""
        self._pending: deque[StepPlan] = deque()
        """Handed over and not come back, oldest first."""
        self._dormant: Waiter | None = None
        """The watch's, while nothing is under way."""
        self.last_step: float | None = None
        self.busy_since: float | None = None
        self.losses = 0
        self.num_dropped = 0
        self.restarting: str | None = None
        self.asleep = False
        self.num_sleeps = 0
        self.executing = False
        self._commands: deque[CommandWorker] = deque()
        """That came while there was no worker."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            if self._commands:
                await self._execute(self._commands.popleft())
                continue
            end = await (self._doze() if self.asleep else self._serve())
            if isinstance(end, CommandWorker):
                await self._execute(end)
            elif end is not None:
                await self._replace(end)
            else:
                return

    async def _doze(self) -> CommandWorker | None:
        """Wait for a command to the sleeping worker; None when the inbox is closed."""
        while await self._inbox.wait():
            while (message := self._inbox.take()) is not None:
                if isinstance(message, CommandWorker):
                    return message
                self.num_dropped += isinstance(message, StepPlan)
        return None

    async def _execute(self, commanded: CommandWorker) -> None:
        """Between steps: the scheduler plans nothing meanwhile."""
        if self._pending:
            commanded.done(None, RuntimeError("a command came while a step was under way"))
            return
        self.executing = True
        try:
            report = await self._worker_host.command(commanded.command)
        except WorkerStuck:
            raise
        except Exception as error:
            if not isinstance(error, InvalidRequest):  # a refusal is for its caller alone
                logger.error("the worker did not execute the command: %s", _reason(error), exc_info=error)
            commanded.done(None, error)
            if isinstance(error, WorkerGone) and not self.asleep:  # a sleeping one has nothing to lose
                await self._replace(error)
            return
        finally:
            self.executing = False
        self._note_sleep(commanded.command, report)
        commanded.done(report, None)

    def _note_sleep(self, command: object, report: WorkerReport) -> None:
        if isinstance(command, SleepWorker) and (not self.asleep or command.level > WITHOUT_CACHE):
            self._report_asleep(keeps_host=command.level <= WITHOUT_CACHE)  # again when a sleep gets deeper
        elif isinstance(command, WakeWorker) and report.ready is not None and self.asleep:
            if report.renewed:  # the other one died in its sleep, and what it had kept with it
                self._report_asleep(keeps_host=False)
            self.asleep = False
            self._scheduler.control(WorkerRestarted(report.ready))

    def _report_asleep(self, *, keeps_host: bool) -> None:
        self.asleep = True
        self.losses += 1
        self.num_sleeps += 1
        self._scheduler.control(WorkerAsleep(keeps_host=keeps_host))

    async def _serve(self) -> Exception | CommandWorker | None:
        """Run until the worker is lost, which gives the reason, or until a command comes; None when results are not
        wanted any more."""
        ends: list[Exception | None] = []

        async def part(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
                ends.append(None)
            except Exception as error:  # told below, where it stands alone
                ends.append(error)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(part, self._pass_results)
            group.start_soon(part, self._pass_plans)
            group.start_soon(self._worker_host.stand_by)
            if self._timeout is not None or self._worker_host.replaceable:
                group.start_soon(part, self._watch)
        raised = [end for end in ends if end is not None]
        end = raised[0] if raised else None
        # Parts that were awake already when the first one ended go on to their next wait: an order may be in hand.
        self._commands.extend(other.commanded for other in raised[1:] if isinstance(other, _Commanded))
        if isinstance(end, _Lost):
            return end.cause
        if isinstance(end, _Commanded):
            return end.commanded
        if end is not None:
            raise end
        return None

    async def _pass_plans(self) -> None:
        """The last message stays in hand until there is another one."""
        while await self._inbox.wait():
            while (message := self._inbox.take()) is not None:
                match message:
                    case StepPlan():
                        self._launch(message)
                    case RestartWorker(reason=reason, engine_epoch=epoch, fault=fault):
                        if epoch == self.losses:
                            self._num_answers -= fault
                            raise _Lost(WorkerGone(reason, fault=fault))
                    case CommandWorker():
                        raise _Commanded(message)
                    case _:
                        assert_never(message)

    def _launch(self, plan: StepPlan) -> None:
        if plan.engine_epoch != self.losses:
            self.num_dropped += 1
            return
        if not self._pending:
            self.busy_since = self._clock.now()
            if self._dormant is not None:
                self._dormant.wake()
        self._pending.append(plan)
        self._worker_host.send(plan)

    async def _pass_results(self) -> None:
        while True:
            try:
                result = await self._worker_host.receive()
                if not self._pending:
                    raise WorkerGone("the worker gave a result without a launched plan")
                check_order(self._pending[0], result)
            except Exception as error:  # the choke point for what a step raises
                raise _Lost(error) from error
            self._pending.popleft()
            now = self.last_step = self._clock.now()
            self.busy_since = now if self._pending else None
            self._num_answers += 1
            try:
                if not self._scheduler.offer(StepFinished(result)):
                    raise RuntimeError("the scheduler has no room for the result of a plan that it sent")
            except MailboxClosed:
                return  # the scheduler has left, so results are not wanted any more

    async def _watch(self) -> None:
        """A step has its deadline from when it was begun, and a worker that is stopped is not waited for that long.

        Looks up once per deadline, or every second where a worker can be stopped; not once per step. Looks count, not
        seconds, so that being suspended together with the worker is no loss of it.
        """
        looks = 0
        while True:
            if self.busy_since is None:
                looks = 0
                self._dormant = new_waiter()
                await self._dormant.wait()
                self._dormant = None
                continue
            wait = LOOK_SECONDS if self._worker_host.replaceable else math.inf
            if self._timeout is not None:
                left = self.busy_since + self._timeout - self._clock.now()
                if left <= 0.0:
                    raise _Lost(_hung(self._timeout, self._worker_host))
                wait = min(left, wait)
            looks = looks + 1 if self._worker_host.stopped else 0
            if looks > STOPPED_LOOKS:
                raise _Lost(WorkerGone("the worker process was stopped by a signal", fault=False))
            began = self._clock.now()
            await new_waiter().wait(wait)
            now = self._clock.now()
            if now - began > wait + LOOK_SECONDS and self.busy_since is not None:  # suspended, and the worker with it
                self.busy_since = min(self.busy_since + now - began, now)

    async def _replace(self, cause: Exception) -> None:
        """The worker is lost: say so, drop what it was asked, and come back when there is another one."""
        self._drop_plans()
        since = self._clock.now() if self.busy_since is None else self.busy_since
        self.busy_since = None
        self.losses += 1
        if self._num_answers > 0:
            self._crashes.forgive()
        self._num_answers = 0
        self.restarting = reason = _reason(cause)
        if isinstance(cause, WorkerStuck):
            raise cause
        fault = not isinstance(cause, WorkerGone) or cause.fault
        logger.error("the worker is lost: %s", reason, exc_info=cause)
        self._scheduler.control(WorkerLost(reason, fault, found_no_memory(cause)))
        ready = await self._restart(cause, since)
        self.restarting = None
        self._drop_plans()
        logger.info("the worker is back")
        self._scheduler.control(WorkerRestarted(ready))

    def _drop_plans(self) -> None:
        """Those that the scheduler sent before it heard of the loss: later ones need their room."""
        self.num_dropped += len(self._pending)
        self._pending.clear()
        while (message := self._inbox.take()) is not None:
            self.num_dropped += isinstance(message, StepPlan)
            if isinstance(message, CommandWorker):
                self._commands.append(message)

    async def _restart(self, cause: Exception, since: float) -> WorkerReady:
        """Raises the root cause when there were too many losses. since: when the step began that was lost."""
        pause = 0.0
        while True:
            now = self._clock.now()
            if self._crashes.add(now - since):
                cause.add_note(f"the worker was lost again and again ({self._crashes}), and no step has finished since")
                raise cause
            since = now
            await anyio.sleep(pause)
            pause = min(max(_FIRST_PAUSE_SECONDS, 2 * pause), _LONGEST_PAUSE_SECONDS)
            try:
                ready = await self._worker_host.restart()
            except (WorkerStuck, WeightsChanged):  # neither gets better by another try
                raise
            except Exception as error:
                logger.error("the worker could not be restarted: %s", _reason(error), exc_info=error)
                cause = error
            else:
                self._crashes.charge(self._clock.now() - since)
                return ready


def check_order(plan: StepPlan, result: StepResult) -> None:
    """Refuse a result that is not that of the oldest plan; the scheduler checks its columns.

    Raises:
        WorkerGone: it is that of another step, or of another worker.
    """
    if result.step != plan.step or result.engine_epoch != plan.engine_epoch:
        raise WorkerGone(f"the worker's reply to step {plan.step} is that of another step")


def _reason(cause: Exception) -> str:
    """Fit for clients: the text of what is not ours may hold anything."""
    return cause.message if isinstance(cause, TroupeError) else f"a model step failed with {type(cause).__name__}"


def _hung(timeout: float, worker_host: WorkerHost) -> Exception:
    text = f"a model step took longer than {timeout:g} s (step_timeout) and counts as hung"
    if not worker_host.replaceable:
        return WorkerStuck(text)
    return WorkerGone(text, fault=not worker_host.stopped)


class _Commanded(Exception):
    def __init__(self, commanded: CommandWorker) -> None:
        super().__init__("a command came")
        self.commanded = commanded


class _Lost(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
