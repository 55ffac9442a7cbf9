"""Worker actor: carries plans to the worker's seat and results back, and brings a worker back that was lost.

Owns:      the plans in flight and the count of losses; the model lives in the seat.
Receives:  StepPlan (as many as the scheduler has credits); on the control lane RestartWorker.
Sends:     StepFinished to the scheduler, by offer: a scheduler without room for a result it asked for is a bug.
           On its control lane WorkerLost at once when a step fails, and WorkerBack when there is a worker again.
On crash:  the engine fails with the root cause, and every open request with it. So it does when the worker is lost
           more often than its intensity allows without finishing a step.
"""

import logging
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from troupellm.actors.intensity import Crashes, Intensity
from troupellm.actors.mailbox import Mailbox, MailboxClosed
from troupellm.actors.ports import Clock
from troupellm.actors.worker_seat import WorkerGone, WorkerSeat, WorkerStuck, found_no_memory
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.scheduler import StepFinished, WorkerBack, WorkerLost
from troupellm.protocol.worker import RestartWorker, StepPlan, WorkerReady

logger = logging.getLogger("troupellm.engine")

_FIRST_PAUSE_SECONDS = 0.05
"""Before a restart that follows one which failed; doubles each time."""


class ResultSink(Protocol):
    """The scheduler's mailbox."""

    def offer(self, message: StepFinished) -> bool: ...
    def control(self, message: WorkerLost | WorkerBack) -> None: ...


class WorkerActor:
    """Publishes `last_step`, when a step last finished, and `busy_since`, when the one under way began (both in seconds
    on the clock, or None), `losses`, and `restarting`: why there is no worker right now, or None."""

    def __init__(
        self,
        inbox: Mailbox[StepPlan, RestartWorker],
        scheduler: ResultSink,
        seat: WorkerSeat,
        clock: Clock,
        max_plans_in_flight: int = 1,
        intensity: Intensity | None = None,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._seat = seat
        self._clock = clock
        self._max_launched = max_plans_in_flight
        self._launched = 0
        self._crashes = Crashes(intensity or Intensity(), clock)
        self.last_step: float | None = None
        self.busy_since: float | None = None
        self.losses = 0
        self.restarting: str | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while self._launched or await self._inbox.wait():
            plans, order = self._take()
            if order is not None:
                await self._replace(WorkerGone(order.reason, fault=order.fault))
                continue
            if not (plans or self._launched):
                continue
            self.busy_since = self._clock.now()
            try:
                result = await self._seat.advance(plans)
            except WorkerStuck:
                raise
            except Exception as error:  # the choke point for what a step raises
                await self._replace(error)
                continue
            finally:
                self.busy_since = None
            self._launched -= 1
            self.last_step = self._clock.now()
            self._crashes.forgive()
            try:
                if not self._scheduler.offer(StepFinished(result)):
                    raise RuntimeError("the scheduler has no room for the result of a plan that it sent")
            except MailboxClosed:
                return  # it has left, so nobody wants results any more

    def _take(self) -> tuple[tuple[StepPlan, ...], RestartWorker | None]:
        """Plans to launch, or the order to replace the worker, before which no plan counts.

        The last one stays in hand while it is computed.
        """
        plans: list[StepPlan] = []
        while self._inbox.depth:
            message = self._inbox.take()
            if isinstance(message, RestartWorker):
                if message.engine_epoch == self.losses:
                    return (), message
            elif message is not None and message.engine_epoch == self.losses:
                plans.append(message)
                self._launched += 1
                if self._launched >= self._max_launched:
                    break
        return tuple(plans), None

    async def _replace(self, cause: Exception) -> None:
        """The worker is lost: say so, drop what it was asked, and come back when there is another one."""
        while self._inbox.take() is not None:  # the scheduler sends no plan before it has heard of the loss
            pass
        self._launched = 0
        self.losses += 1
        self.restarting = reason = _reason(cause)
        fault = not isinstance(cause, WorkerGone) or cause.fault
        logger.error("the worker is lost: %s", reason, exc_info=cause)
        self._scheduler.control(WorkerLost(reason, fault, found_no_memory(cause)))
        ready = await self._restart(cause)
        self.restarting = None
        logger.info("the worker is back")
        self._scheduler.control(WorkerBack(ready))

    async def _restart(self, cause: Exception) -> WorkerReady:
        """Raises the root cause when there were too many losses."""
        pause = 0.0
        while True:
            if self._crashes.add():
                cause.add_note(f"the worker was lost again and again ({self._crashes}), and no step has finished since")
                raise cause
            await anyio.sleep(pause)
            pause = max(_FIRST_PAUSE_SECONDS, 2 * pause)
            try:
                return await self._seat.restart()
            except WorkerStuck:
                raise
            except Exception as error:
                logger.error("the worker could not be restarted: %s", _reason(error), exc_info=error)
                cause = error


def _reason(cause: Exception) -> str:
    """Fit for clients: the text of what is not ours may hold anything."""
    return cause.message if isinstance(cause, TroupeError) else f"a model step failed with {type(cause).__name__}"
