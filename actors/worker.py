"""Worker actor: carries plans to the model's own thread and results back.

Owns:      nothing but the plans in flight; the model lives behind the thread.
Receives:  StepPlan (as many as the scheduler has credits).
Sends:     StepFinished to the scheduler, by offer: a scheduler without room for a result it asked for is a bug.
On crash:  the engine fails with the root cause, and every open request with it.
"""

from collections import deque
from collections.abc import Sequence
from typing import Never, Protocol

import anyio
from anyio.abc import TaskStatus

from troupellm.actors.mailbox import Mailbox, MailboxClosed
from troupellm.actors.ports import Clock, Threads
from troupellm.protocol.config import WorkerConfig
from troupellm.protocol.errors import WorkerCrashed
from troupellm.protocol.scheduler import StepFinished
from troupellm.protocol.worker import StepPlan, StepResult, Ticket, Worker


class ResultSink(Protocol):
    def offer(self, message: StepFinished) -> bool: ...


class StepPipeline:
    """The synchronous core, called on the model's thread only: launches plans and collects results in order."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._launched: deque[tuple[StepPlan, Ticket]] = deque()

    def advance(self, plans: Sequence[StepPlan]) -> StepResult:
        """Launch `plans`, then wait for the oldest one launched.

        Raises:
            WorkerCrashed: the reply does not fit the plan.
            Exception: whatever the worker raised; the step is lost.
        """
        for plan in plans:
            self._launched.append((plan, self._worker.launch(plan)))
        plan, ticket = self._launched.popleft()
        result = self._worker.collect(ticket)
        _check(plan, result)
        return result


class WorkerActor:
    """The asynchronous shell. `thread` must make all its calls from one thread.

    Publishes `last_step`: when a step last finished, in seconds on the clock; None before the first.
    """

    def __init__(
        self,
        inbox: Mailbox[StepPlan, Never],
        scheduler: ResultSink,
        worker: Worker,
        thread: Threads,
        clock: Clock,
        config: WorkerConfig,
        max_plans_in_flight: int = 1,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._pipeline = StepPipeline(worker)
        self._thread = thread
        self._clock = clock
        self._timeout = config.step_timeout or None
        self._max_launched = max_plans_in_flight
        self.last_step: float | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        launched = 0
        while launched or await self._inbox.wait():
            plans: list[StepPlan] = []
            while launched < self._max_launched and self._inbox.depth and (plan := self._inbox.take()) is not None:
                plans.append(plan)  # the last one stays in hand while it is computed
                launched += 1
            result = await self._advance(tuple(plans))
            launched -= 1
            self.last_step = self._clock.now()
            try:
                if not self._scheduler.offer(StepFinished(result)):
                    raise RuntimeError("the scheduler has no room for the result of a plan that it sent")
            except MailboxClosed:
                return  # it has left, so nobody wants results any more

    async def _advance(self, plans: tuple[StepPlan, ...]) -> StepResult:
        """One trip to the thread and back. A thread cannot be killed, so a hung step is abandoned, not ended."""
        with anyio.move_on_after(self._timeout):
            return await self._thread.run(self._pipeline.advance, plans)
        raise WorkerCrashed(f"a model step took longer than {self._timeout:g} s (step_timeout) and counts as hung")


def _check(plan: StepPlan, result: StepResult) -> None:
    """Refuse a reply that the scheduler could misread."""
    rows = len(result.rows)
    fits = (
        result.step == plan.step
        and result.engine_epoch == plan.engine_epoch
        and result.rows == plan.rows
        and result.epochs == plan.epochs
        and len(result.token_counts) == rows
        and sum(result.token_counts) == len(result.tokens)
    )
    if not fits:
        raise WorkerCrashed(f"the worker's reply to step {plan.step} has another step, rows or token counts")
