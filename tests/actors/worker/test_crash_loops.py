"""A worker that never gets anywhere is given up within minutes, at the budget of production and on a virtual clock."""

from collections import deque
from functools import partial
from math import inf

import anyio
import pytest
from trio.testing import MockClock

from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.worker.actor import WorkerActor
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import WeightsChanged
from troupellm.protocol.messages.scheduler import StepFinished, WorkerLost, WorkerRestarted
from troupellm.protocol.messages.sleep import WorkerControl
from troupellm.protocol.messages.worker import StepPlan, StepResult, WorkerReady
from troupellm.tests.support.scheduler.oracle import ready

STEP_TIMEOUT = 60.0
"""The server's."""
MINUTES = 600.0
"""Most seconds in all, for any form of the loop."""


class VirtualClock:
    def now(self) -> float:
        return anyio.current_time()

    def wall(self) -> float:
        return anyio.current_time()


class MortalHost:
    """Its workers die over a step once they have finished `steps`, or after `idle` seconds without one."""

    pid = spare_pid = None
    replaceable = True
    stopped = False

    def __init__(
        self,
        *,
        steps: int = 0,
        step: float = 0.0,
        load: float = 0.0,
        broken: Exception | None = None,
        idle: float = inf,
    ) -> None:
        """step, load: seconds that they take. broken: the reason why no successor can be loaded."""
        self.restarts = 0
        self._steps, self._step, self._load, self._broken, self._idle = steps, step, load, broken, idle
        self._plans: deque[StepPlan] = deque()
        self._arrived = anyio.Event()
        self._finished = 0

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._arrived.set()

    async def receive(self) -> StepResult:
        while not self._plans:
            self._arrived = anyio.Event()
            with anyio.move_on_after(self._idle) as idle:
                await self._arrived.wait()
            if idle.cancelled_caught:
                raise WorkerGone("the worker was killed", fault=False)
        await anyio.sleep(self._step)
        plan = self._plans.popleft()
        if self._finished >= self._steps:
            raise WorkerGone("the worker was killed", fault=False)
        self._finished += 1
        return StepResult(
            step=plan.step, engine_epoch=plan.engine_epoch, rows=(), epochs=(), token_counts=(), tokens=()
        )

    async def stand_by(self) -> None:
        """There is no spare."""

    async def restart(self) -> WorkerReady:
        self.restarts += 1
        self._plans.clear()
        self._finished = 0
        await anyio.sleep(self._load)
        if self._broken is not None:
            raise self._broken
        return ready()


class Life:
    """A worker actor with a scheduler that always has another plan, unless it is `idle`."""

    def __init__(
        self, worker_host: MortalHost, *, losses: float = inf, idle: bool = False, one_plan: bool = False
    ) -> None:
        """losses: after so many nothing more is wanted. one_plan: each worker gets one plan and no other."""
        self._one_plan = one_plan
        self._most = losses
        self._idle = idle
        self._epoch = 0
        self._step = 0
        self._plans: Mailbox[StepPlan, WorkerControl] = Mailbox("worker", 2)
        self._results: Mailbox[StepFinished, WorkerLost | WorkerRestarted] = Mailbox("scheduler", 2)
        self._actor = WorkerActor(
            self._plans, self._results, worker_host, VirtualClock(), STEP_TIMEOUT, SUPERVISION["worker"].intensity
        )

    async def run(self) -> tuple[Exception | None, float]:
        """The error that the actor ended with, and after how many seconds."""
        error: Exception | None = None
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self._schedule)
            try:
                await self._actor.run()
            except Exception as raised:
                error = raised
            group.cancel_scope.cancel()
        return error, anyio.current_time() - began

    async def _schedule(self) -> None:
        await self._plan()
        while await self._results.wait():
            while (message := self._results.take()) is not None:
                if isinstance(message, WorkerLost):
                    self._epoch += 1
                elif self._epoch >= self._most:
                    self._plans.close()
                    return
                elif not self._one_plan or isinstance(message, WorkerRestarted):
                    await self._plan()

    async def _plan(self) -> None:
        if self._idle:
            return
        self._step += 1
        await self._plans.put(
            StepPlan(step=self._step, engine_epoch=self._epoch, rows=(), epochs=(), starts=(), counts=())
        )


def lived(host_of: partial[MortalHost], **options: object) -> tuple[MortalHost, Exception | None, float]:
    async def main() -> tuple[MortalHost, Exception | None, float]:
        worker_host = host_of()
        error, seconds = await Life(worker_host, **options).run()  # type: ignore[arg-type]
        return worker_host, error, seconds

    return anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})


NO_WEIGHTS = RuntimeError("there are no weights any more")
MOST = SUPERVISION["worker"].intensity.restarts
LOOPS = {
    "no successor can be loaded": (partial(MortalHost, broken=NO_WEIGHTS), MOST),
    "successors are silent for two minutes": (partial(MortalHost, load=120.0, broken=NO_WEIGHTS), 4),
    "every step is fatal at once": (partial(MortalHost), MOST),
    "every step is fatal, and loading takes 4 seconds": (partial(MortalHost, load=4.0), MOST),
    "every step is fatal after 5 seconds": (partial(MortalHost, step=5.0), MOST),
    "every step is fatal, and loading takes more than a minute": (partial(MortalHost, load=70.0), 4),
    "every step hangs": (partial(MortalHost, step=inf, load=5.0), 4),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_crash_loop_is_given_up_within_minutes(loop: str) -> None:
    host_of, restarts = LOOPS[loop]
    worker_host, error, seconds = lived(host_of)
    assert isinstance(error, RuntimeError if "loaded" in loop or "silent" in loop else WorkerGone)
    assert "lost again and again" in error.__notes__[0]
    assert worker_host.restarts == restarts
    assert seconds <= MINUTES


def test_a_worker_is_given_up_at_once_where_the_weights_on_disk_are_others() -> None:
    changed = WeightsChanged("model.safetensors has changed")
    worker_host, error, seconds = lived(partial(MortalHost, load=4.0, broken=changed))
    assert error is changed
    assert (worker_host.restarts, seconds) == (1, 4.0)


@pytest.mark.parametrize("load", [0.0, 4.0, 300.0])
def test_a_worker_that_finishes_a_step_between_its_deaths_is_never_given_up(load: float) -> None:
    worker_host, error, _ = lived(partial(MortalHost, steps=1, load=load), losses=200)
    assert error is None
    assert worker_host.restarts == 200


def test_rare_kills_of_an_idle_worker_never_add_up() -> None:
    worker_host, error, seconds = lived(partial(MortalHost, load=10.0, idle=600.0), losses=200, idle=True)
    assert error is None
    assert worker_host.restarts == 200
    assert seconds > 200 * 600.0


@pytest.mark.parametrize("load", [4.0, 70.0])
def test_workers_that_answer_the_one_plan_they_get_are_never_given_up(load: float) -> None:
    """As where each request needs a single step: vectors, or one token."""
    worker_host, error, _ = lived(partial(MortalHost, steps=1, idle=5.0, load=load), losses=60, one_plan=True)
    assert error is None
    assert worker_host.restarts == 60
