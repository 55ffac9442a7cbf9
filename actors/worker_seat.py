"""Where the worker sits: how a plan gets there and a result back, and how a worker that failed is replaced.

`ThreadSeat` keeps it on a thread of this process. The seat is passive: the worker actor alone calls it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import anyio

from troupellm.actors.ports import Threads
from troupellm.protocol.errors import WorkerCrashed
from troupellm.protocol.worker import StepPlan, StepResult, Ticket, Worker, WorkerReady

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


class WorkerGone(WorkerCrashed):
    """The worker is dead, or was given up.

    Attributes:
        fault: it failed by itself; False when somebody outside killed it.
    """

    def __init__(self, message: str, *, fault: bool = True) -> None:
        super().__init__(message)
        self.fault = fault


class WorkerStuck(WorkerCrashed):
    """The worker neither answers nor can be replaced: the end of the engine."""


class WorkerSeat(Protocol):
    """Calls do not overlap. After `advance` raised, nothing but `restart` is called."""

    async def advance(self, plans: Sequence[StepPlan]) -> StepResult:
        """Launch `plans`, then wait for the oldest one launched.

        Raises:
            WorkerStuck: nothing helps.
            WorkerGone: the worker died or hangs.
            Exception: whatever the step raised; the step is lost.
        """

    async def restart(self) -> WorkerReady:
        """Bring the worker back, with no rows and nothing in its cache; plans under way are dropped.

        Raises:
            WorkerStuck: nothing helps.
            Exception: it did not work this time.
        """


class ThreadSeat:
    """`thread` must make all its calls from one thread.

    A thread cannot be killed, so a step that hangs is abandoned, not ended, and the worker cannot come back.
    """

    def __init__(self, worker: Worker, thread: Threads, ready: WorkerReady, timeout: float | None) -> None:
        """timeout: seconds after which a step, or a restart, counts as hung."""
        self._worker = worker
        self._thread = thread
        self._ready = ready
        self._timeout = timeout
        self._launched: deque[tuple[StepPlan, Ticket]] = deque()

    async def advance(self, plans: Sequence[StepPlan]) -> StepResult:
        return await self._within("a model step", self._advance, tuple(plans))

    async def restart(self) -> WorkerReady:
        await self._within("the worker's restart", self._restart)
        return self._ready

    async def _within(self, what: str, call: Callable[[Unpack[ArgsT]], T], *args: *ArgsT) -> T:
        """One trip to the thread and back."""
        with anyio.move_on_after(self._timeout):
            return await self._thread.run(call, *args)
        raise WorkerStuck(f"{what} took longer than {self._timeout:g} s (step_timeout) and counts as hung")

    def _advance(self, plans: Sequence[StepPlan]) -> StepResult:
        for plan in plans:
            self._launched.append((plan, self._worker.launch(plan)))
        plan, ticket = self._launched.popleft()
        result = self._worker.collect(ticket)
        check_reply(plan, result)
        return result

    def _restart(self) -> None:
        self._launched.clear()
        self._worker.reset()


def check_reply(plan: StepPlan, result: StepResult) -> None:
    """Refuse a reply that the scheduler could misread.

    Raises:
        WorkerGone: it does not fit the plan.
    """
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
        raise WorkerGone(f"the worker's reply to step {plan.step} has another step, rows or token counts")


def found_no_memory(error: Exception) -> bool:
    """Whether a step failed for want of memory, on whatever device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
