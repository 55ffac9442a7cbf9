"""The worker actor: plans go down in order, results come back, and what breaks a step is told as it is."""

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import SystemClock
from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.actors.runtime.thread_pool import StepThread
from troupellm.actors.runtime.waiter import new_waiter
from troupellm.actors.worker.actor import WorkerActor, check_order
from troupellm.actors.worker.thread_host import ThreadWorker, WorkerGone, WorkerStuck
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import GraphCaptureError, WorkerCrashed
from troupellm.protocol.messages.scheduler import StepFinished, WorkerLost, WorkerRestarted
from troupellm.protocol.messages.sleep import CommandWorker, StopProfile, WorkerCommand, WorkerReport
from troupellm.protocol.messages.worker import NewRow, RestartWorker, SamplingState, StepPlan, StepResult, WorkerReady

pytestmark = pytest.mark.anyio


def plan(step: int, **fields: Any) -> StepPlan:
    return StepPlan(**{"step": step, "engine_epoch": 0, "rows": (), "epochs": (), "starts": (), "counts": (), **fields})


def first_plan(prompt: list[int]) -> StepPlan:
    tokens = memoryview(b"".join(token.to_bytes(4, "little") for token in prompt)).tobytes()
    new = NewRow(
        row=0,
        epoch=0,
        request_id="r",
        token_ids=tokens,
        num_prompt_tokens=len(prompt),
        sampling=SamplingState(),
        blocks=((0,),),
    )
    return plan(1, rows=(0,), epochs=(0,), starts=(0,), counts=(len(prompt),), new_rows=(new,))


class Bench:
    """The actor with both its mailboxes."""

    def __init__(self, worker: Any, step_timeout: float | None = None) -> None:
        self.plans: Mailbox[StepPlan, RestartWorker] = Mailbox("worker", 2)
        self.results: Mailbox[StepFinished, WorkerLost | WorkerRestarted] = Mailbox("scheduler", 2)
        self.thread = StepThread("step")
        self.ready = worker.load(EngineConfig(), lambda progress: None)
        worker_host = ThreadWorker(worker, self.thread, self.ready, step_timeout)
        self.actor = WorkerActor(self.plans, self.results, worker_host, SystemClock(), step_timeout, Intensity())

    async def result(self) -> StepResult:
        assert await self.results.wait()
        message = self.results.take()
        assert isinstance(message, StepFinished)
        return message.result

    async def replaced(self) -> WorkerLost:
        """The message that the scheduler gets about a worker that is lost and comes back."""
        assert await self.results.wait()
        lost = self.results.take()
        assert isinstance(lost, WorkerLost)
        assert await self.results.wait()
        assert self.results.take() == WorkerRestarted(self.ready)
        return lost


async def test_results_come_in_the_order_of_their_plans(
    fake_worker: Any, expected: Callable[[list[int], int], list[int]]
) -> None:
    bench = Bench(fake_worker)
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        await bench.plans.put(first_plan([5, 6, 7]))
        await bench.plans.put(plan(2, rows=(0,), epochs=(0,), starts=(3,), counts=(1,)))
        first, second = await bench.result(), await bench.result()
        assert (first.step, second.step) == (1, 2)
        assert list(first.tokens + second.tokens) == expected([5, 6, 7], 2)
        assert bench.actor.last_step is not None
        bench.plans.close()
    await bench.thread.close()


async def test_a_worker_that_fails_is_replaced(
    fake_worker: Any, expected: Callable[[list[int], int], list[int]]
) -> None:
    fake_worker.poison = 6
    bench = Bench(fake_worker)
    await bench.plans.put(first_plan([5, 6, 7]))
    await bench.plans.put(plan(2, rows=(0,), epochs=(0,), starts=(3,), counts=(1,)))
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        assert await bench.replaced() == WorkerLost("a model step failed with ValueError")
        assert (fake_worker.resets, bench.actor.losses, bench.plans.depth) == (1, 1, 0)
        fake_worker.poison = None
        await bench.plans.put(first_plan([5, 6, 7]))  # of the epoch that is over
        await bench.plans.put(msgspec.structs.replace(first_plan([5, 6, 7]), step=2, engine_epoch=1))
        result = await bench.result()
        assert (result.step, list(result.tokens)) == (2, expected([5, 6, 7], 1))
        bench.plans.close()
    await bench.thread.close()


async def test_a_thread_that_cannot_capture_graphs_is_the_end(
    fake_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that is damaged is the engine's own."""
    bench = Bench(fake_worker)
    await bench.plans.put(plan(1))

    def launch(_: StepPlan) -> None:
        raise GraphCaptureError("a graph could not be captured")

    monkeypatch.setattr(fake_worker, "launch", launch)
    with pytest.raises(WorkerStuck, match="a graph could not be captured; start with --enforce-eager") as caught:
        await bench.actor.run()
    assert isinstance(caught.value.__cause__, GraphCaptureError)
    assert not fake_worker.resets
    await bench.thread.close()


@pytest.mark.parametrize("wrong", [{"engine_epoch": 1}, {"step": 4}], ids=str)
def test_a_reply_to_another_plan_is_refused(wrong: dict[str, Any]) -> None:
    right = StepResult(step=3, engine_epoch=0, rows=(), epochs=(), token_counts=(), tokens=())
    check_order(plan(3), right)
    with pytest.raises(WorkerGone, match="reply to step 3"):
        check_order(plan(3), msgspec.structs.replace(right, **wrong))


async def test_a_worker_is_replaced_by_order(fake_worker: Any) -> None:
    bench = Bench(fake_worker)
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        bench.plans.control(RestartWorker("it talks nonsense", engine_epoch=0))
        assert await bench.replaced() == WorkerLost("it talks nonsense")
        bench.plans.control(RestartWorker("an order that comes too late", engine_epoch=0))
        await bench.plans.put(plan(1, engine_epoch=1))
        assert (await bench.result()).step == 1
        bench.plans.control(RestartWorker("it may not have heard", engine_epoch=1, fault=False))
        assert await bench.replaced() == WorkerLost("it may not have heard", fault=False)
        assert bench.actor.losses == 2
        bench.plans.close()
    await bench.thread.close()


async def test_a_worker_that_never_finishes_a_step_is_given_up(fake_worker: Any) -> None:
    fake_worker.poison = 5
    bench = Bench(fake_worker)
    failures: list[Exception] = []

    async def live() -> None:
        try:
            await bench.actor.run()
        except ValueError as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(live)
        for epoch in range(9):
            await bench.plans.put(msgspec.structs.replace(first_plan([5]), engine_epoch=epoch))
            await bench.replaced()
    assert [str(error) for error in failures] == ["poisoned"]
    assert "4 times in 60 s" in failures[0].__notes__[0]
    assert fake_worker.resets == 3
    await bench.thread.close()


async def test_a_failed_restart_is_tried_again(fake_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker.poison = 5
    bench = Bench(fake_worker)
    original = fake_worker.reset

    def fails() -> None:
        monkeypatch.setattr(fake_worker, "reset", original)
        raise OSError("not now")

    monkeypatch.setattr(fake_worker, "reset", fails)
    await bench.plans.put(first_plan([5]))
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        assert (await bench.replaced()).fault
        bench.plans.close()
    assert fake_worker.resets == 1
    await bench.thread.close()


async def test_want_of_memory_is_told(fake_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: StepPlan) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(fake_worker, "launch", fails)
    bench = Bench(fake_worker)
    await bench.plans.put(first_plan([5]))
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        assert (await bench.replaced()).exhausted
        bench.plans.close()
    await bench.thread.close()


async def test_a_hung_step_fails_after_its_deadline(fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    bench = Bench(fake_worker, step_timeout=0.01)
    await bench.plans.put(first_plan([5]))
    with pytest.raises(WorkerCrashed, match=r"longer than 0\.01 s \(step_timeout\)"):
        await bench.actor.run()
    fake_worker.gate.set()
    assert await bench.thread.close()


class StoppedHost:
    """A worker process that a signal has stopped, until it is replaced."""

    pid = spare_pid = None
    replaceable = True
    stopped = True

    def __init__(self, ready: WorkerReady) -> None:
        self._ready = ready

    def send(self, plan: StepPlan) -> None:
        """It does not hear."""

    async def receive(self) -> StepResult:
        await anyio.sleep_forever()
        raise AssertionError

    async def stand_by(self) -> None:
        """There is no spare."""

    async def restart(self) -> WorkerReady:
        self.stopped = False
        return self._ready


@pytest.mark.parametrize("step_timeout", [None, 3600.0])
async def test_a_stopped_worker_is_replaced_long_before_its_deadline(
    fake_worker: Any, monkeypatch: pytest.MonkeyPatch, step_timeout: float | None
) -> None:
    monkeypatch.setattr("troupellm.actors.worker.actor.LOOK_SECONDS", 0.0)
    bench = Bench(fake_worker)
    worker_host = StoppedHost(bench.ready)
    bench.actor = WorkerActor(bench.plans, bench.results, worker_host, SystemClock(), step_timeout, Intensity())
    await bench.plans.put(first_plan([5]))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(bench.actor.run)
            assert await bench.replaced() == WorkerLost("the worker process was stopped by a signal", fault=False)
            bench.plans.close()
            group.cancel_scope.cancel()
    await bench.thread.close()


class HandClock(SystemClock):
    """Advances while a task waits for a time; some waits take longer than intended."""

    def __init__(self, longer: dict[int, float]) -> None:
        self.seconds, self._longer, self._waits = 0.0, longer, 0
        self._woken = anyio.Event()

    def now(self) -> float:
        return self.seconds

    def wake(self) -> None:
        self._woken.set()

    async def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            await self._woken.wait()
            return True
        await anyio.lowlevel.checkpoint()
        self._waits += 1
        self.seconds += timeout + self._longer.get(self._waits, 0.0)
        return False


@pytest.mark.parametrize(("longer", "lost"), [({}, 60.0), ({7: 500.0}, 60.0 + 501.0), ({7: 0.5, 8: 0.5}, 60.0)])
async def test_time_in_which_everything_was_suspended_is_not_the_steps(
    fake_worker: Any, monkeypatch: pytest.MonkeyPatch, longer: dict[int, float], lost: float
) -> None:
    clock = HandClock(longer)
    monkeypatch.setattr("troupellm.actors.worker.actor.new_waiter", lambda: clock)
    bench = Bench(fake_worker)
    worker_host = StoppedHost(bench.ready)
    worker_host.stopped = False
    bench.actor = WorkerActor(bench.plans, bench.results, worker_host, clock, 60.0, Intensity())
    await bench.plans.put(first_plan([5]))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(bench.actor.run)
            assert "longer than 60 s" in (await bench.replaced()).reason
            assert clock.seconds == pytest.approx(lost)
            bench.plans.close()
            group.cancel_scope.cancel()
    await bench.thread.close()


class MortalHost:
    """A worker process that dies when it is told."""

    pid = spare_pid = None
    replaceable = True
    stopped = False

    def __init__(self, ready: WorkerReady) -> None:
        self._ready = ready
        self._dead = False
        self._waiter: Any = None

    def die(self) -> None:
        self._dead = True
        self._waiter.wake()

    def send(self, plan: StepPlan) -> None:
        """It does not answer."""

    async def receive(self) -> StepResult:
        while not self._dead:
            self._waiter = new_waiter()
            await self._waiter.wait()
        raise WorkerGone("it died", fault=False)

    async def stand_by(self) -> None:
        """There is no spare."""

    async def command(self, command: WorkerCommand) -> WorkerReport:
        assert not self._dead
        return WorkerReport(file="trace", steps=3)

    async def restart(self) -> WorkerReady:
        self._dead = False
        return self._ready


async def test_a_command_that_comes_as_the_worker_dies_is_carried_out_by_the_next(fake_worker: Any) -> None:
    bench = Bench(fake_worker)
    worker_host = MortalHost(bench.ready)
    bench.actor = WorkerActor(bench.plans, bench.results, worker_host, SystemClock(), None, Intensity())
    answers: list[Any] = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(bench.actor.run)
            await anyio.wait_all_tasks_blocked()
            worker_host.die()
            bench.plans.control(CommandWorker(StopProfile(), lambda *answer: answers.append(answer)))
            assert await bench.replaced() == WorkerLost("it died", fault=False)
            await anyio.wait_all_tasks_blocked()
            assert answers == [(WorkerReport(file="trace", steps=3), None)]
            group.cancel_scope.cancel()
    await bench.thread.close()


async def test_a_reply_to_another_step_is_refused(fake_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(ticket: Any) -> StepResult:
        return StepResult(step=ticket.step + 1, engine_epoch=0, rows=(0,), epochs=(0,), token_counts=(1,), tokens=(1,))

    monkeypatch.setattr(fake_worker, "collect", lie)
    bench = Bench(fake_worker)
    await bench.plans.put(first_plan([5]))
    async with anyio.create_task_group() as group:
        await group.start(bench.actor.run)
        assert "step 1" in (await bench.replaced()).reason
        bench.plans.close()
    await bench.thread.close()


async def test_a_scheduler_without_room_is_a_bug(fake_worker: Any) -> None:
    bench = Bench(fake_worker)
    for _ in range(2):
        bench.results.offer(StepFinished(fake_worker.collect(fake_worker.launch(plan(0)))))
    await bench.plans.put(plan(1))
    with pytest.raises(RuntimeError, match="no room"):
        await bench.actor.run()
    await bench.thread.close()


async def test_a_scheduler_that_has_left_is_the_end(fake_worker: Any) -> None:
    bench = Bench(fake_worker)
    bench.results.close()
    await bench.plans.put(plan(1))
    await bench.actor.run()
    await bench.thread.close()
    assert bench.actor.last_step is not None  # the step was computed, and its result had nowhere to go
    assert bench.results.depth == 0
