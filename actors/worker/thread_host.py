"""Where the worker sits: how a plan gets there and a result back, and how a worker that failed is replaced.

`ThreadWorker` keeps it on a thread of this process, `process_host` in a process of its own. A host is passive: the
worker actor alone calls it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio

from troupellm.actors.runtime.ports import Line, Threads
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.models.runner.steps_in_flight import Steps
from troupellm.protocol.errors import GraphCaptureError, WorkerCrashed
from troupellm.protocol.messages.adapters import NO_ADAPTERS, AdapterPreparation
from troupellm.protocol.messages.sleep import WorkerCommand, WorkerReport, execute
from troupellm.protocol.messages.worker import LoadProgress, StepPlan, StepResult, Worker, WorkerReady
from troupellm.protocol.messages.worker_abilities import PreparesAdapters, PreparesGuides, Wait
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


class WorkerGone(WorkerCrashed):
    """The worker is dead, or was given up.

    Attributes:
        fault: it failed by itself; False when it was killed from outside.
        exhausted: it found no memory, or the kernel killed it for want of memory.
    """

    def __init__(self, message: str, *, fault: bool = True, exhausted: bool = False) -> None:
        super().__init__(message)
        self.fault = fault
        self.exhausted = exhausted


class WorkerStuck(WorkerCrashed):
    """The worker neither answers nor can be replaced: the end of the engine."""


class WorkerHost(Protocol):
    """Holds one worker at a time. All calls come from the event loop; results come in the order of the plans."""

    @property
    def pid(self) -> int | None:
        """The worker's process, if it has one of its own."""

    @property
    def spare_pid(self) -> int | None:
        """A process that waits to replace it."""

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes that share the model, the worker's first; empty where it has the whole model."""

    @property
    def replaceable(self) -> bool:
        """Whether a worker that hangs can be ended."""

    @property
    def stopped(self) -> bool:
        """True if a signal from outside has stopped the worker, as far as this can be seen."""

    def send(self, plan: StepPlan) -> None:
        """Hand a plan over. The worker launches it at once, so that its device goes on to it by itself."""

    async def receive(self) -> StepResult:
        """The next result. Being cancelled loses nothing.

        Raises:
            Exception: the worker is of no more use, and only `restart` may be called: `WorkerGone`, or what the step
                raised.
        """

    async def prepare_guide(self, program: GuideProgram) -> BuildOutcome:
        """Have the worker build a guide beside its steps, so that no step waits for it; never raises."""

    async def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        """Have the worker read an adapter beside its steps, before a plan names it; never raises."""

    def release_adapter(self, digest: str) -> None:
        """Have the worker free the host memory of an adapter that no later plan names."""

    async def stand_by(self) -> None:
        """Get ready, beside a worker that serves, for the case that it is lost."""

    async def command(self, command: WorkerCommand) -> WorkerReport:
        """Have the worker execute a command, while it has no plan.

        Raises:
            WorkerGone: it died over it.
            Exception: it refused, and is as it was before.
        """

    async def restart(self) -> WorkerReady:
        """Bring the worker back, with no rows and nothing in its cache; plans under way are dropped.

        Raises:
            WorkerStuck: nothing helps.
            Exception: it did not work this time.
        """


class ThreadWorker:
    """`thread` must make all its calls from one thread, in order.

    A thread cannot be killed, so a step that hangs is abandoned, not ended, and the worker cannot come back.
    """

    pid: int | None = None
    spare_pid: int | None = None
    rank_pids: tuple[int, ...] = ()
    replaceable = False
    stopped = False

    def __init__(
        self,
        worker: Worker,
        thread: Line,
        ready: WorkerReady,
        timeout: float | None,
        pool: Threads | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds after which a restart counts as hung.
            pool: threads beside the steps; None where the worker builds guides when it needs them.
        """
        self._worker = worker
        self._thread = thread
        self._ready = ready
        self._timeout = timeout
        self._pool = pool
        self._results: deque[StepResult | Exception] = deque()
        self._waiter: Waiter | None = None
        self._run = _Run(worker, thread, self._land)

    def send(self, plan: StepPlan) -> None:
        self._run.send(plan)

    async def receive(self) -> StepResult:
        while not self._results:
            waiter = self._waiter = new_waiter()
            await waiter.wait()
        result = self._results.popleft()
        if isinstance(result, Exception):
            raise _final(result)
        return result

    async def prepare_guide(self, program: GuideProgram) -> BuildOutcome:
        if self._pool is not None and isinstance(self._worker, PreparesGuides):
            await self._pool.run(self._worker.prepare_guide, program)
        return "built"

    async def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        if not isinstance(self._worker, PreparesAdapters):
            return NO_ADAPTERS
        if self._pool is None:
            return self._worker.prepare_adapter(digest, folder)
        return await self._pool.run(self._worker.prepare_adapter, digest, folder)

    def release_adapter(self, digest: str) -> None:
        if isinstance(self._worker, PreparesAdapters):
            self._worker.release_adapter(digest)

    async def stand_by(self) -> None:
        """A thread needs nothing."""

    async def command(self, command: WorkerCommand) -> WorkerReport:
        answer: list[tuple[WorkerReport | None, BaseException | None]] = []
        reported: list[LoadProgress] = []
        waiter = new_waiter()

        def done(report: WorkerReport | None, error: BaseException | None) -> None:
            answer.append((report, error))
            waiter.wake()

        self._thread.post(partial(execute, self._worker, command, reported.append), done)
        while not await waiter.wait(self._timeout):  # reading weights takes as long as it moves on
            if not reported:
                raise WorkerStuck(f"a command to the worker took longer than {self._timeout:g} s (step_timeout)")
            reported.clear()
            waiter = new_waiter()
        report, error = answer[0]
        if error is not None:
            raise _final(error) if isinstance(error, Exception) else error
        assert report is not None
        return report

    async def restart(self) -> WorkerReady:
        self._run.drop()
        self._results.clear()
        self._run = _Run(self._worker, self._thread, self._land)
        with anyio.move_on_after(self._timeout):
            await self._thread.run(self._worker.reset)
            return self._ready
        raise WorkerStuck(f"the worker's restart took longer than {self._timeout:g} s (step_timeout)")

    def _land(self, result: StepResult | None, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._results.append(error)
        elif error is not None:
            self._results.append(WorkerGone(f"the step was ended by {type(error).__name__}"))
        elif result is not None:
            self._results.append(result)
        if self._waiter is not None:
            self._waiter.wake()
            self._waiter = None


class _Run:
    """A worker on a thread from one start to the next."""

    def __init__(
        self, worker: Worker, thread: Line, land: Callable[[StepResult | None, BaseException | None], None]
    ) -> None:
        self._thread, self._land = thread, land
        self._steps = Steps(worker, self._wait)
        self._over = False
        """Nothing more is computed."""
        self._wanted = True

    def send(self, plan: StepPlan) -> None:
        self._thread.post(partial(self._advance, plan), self._finished)

    def drop(self) -> None:
        """Report no more results of its steps."""
        self._over, self._wanted = True, False

    def _finished(self, result: StepResult | None, error: BaseException | None) -> None:
        if self._wanted:
            self._land(result, error)

    def _wait(self, wait: Wait) -> None:
        self._thread.post_behind(wait, self._advance, self._finished)

    def _advance(self, plan: StepPlan | None = None) -> StepResult | None:
        """On the thread: launch a plan, else note that a wait is over; then give the result that is due, if one is."""
        if self._over:
            return None
        try:
            if plan is None:
                self._steps.landed()
            else:
                self._steps.launch(plan)
            return self._steps.collect() if self._steps.due else None
        except BaseException:
            self._over = True
            raise


def _final(error: Exception) -> Exception:
    """The error that a worker raised on a thread. The memory that a failed capture leaves behind is this process's
    own."""
    if not isinstance(error, GraphCaptureError):
        return error
    stuck = WorkerStuck(f"{error.message}; start with --enforce-eager (enforce_eager=True), or with worker_process")
    stuck.__cause__ = error
    return stuck


def found_no_memory(error: Exception) -> bool:
    """True if a step failed for want of memory, on any device."""
    if isinstance(error, WorkerGone):
        return error.exhausted
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
