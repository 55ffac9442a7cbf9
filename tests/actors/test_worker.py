"""The worker actor: plans go down in order, results come back, and what breaks a step is told as it is."""

import threading
from collections.abc import Callable
from typing import Any, Never

import anyio
import pytest

from troupellm.actors.mailbox import Mailbox
from troupellm.actors.ports import StepThread, SystemClock
from troupellm.actors.worker import WorkerActor
from troupellm.protocol.config import WorkerConfig
from troupellm.protocol.errors import WorkerCrashed
from troupellm.protocol.scheduler import StepFinished
from troupellm.protocol.worker import NewRow, SamplingState, StepPlan, StepResult

pytestmark = pytest.mark.anyio


def plan(step: int, **fields: Any) -> StepPlan:
    return StepPlan(**{"step": step, "engine_epoch": 0, "rows": (), "epochs": (), "starts": (), "counts": (), **fields})


def first_plan(prompt: list[int]) -> StepPlan:
    tokens = memoryview(b"".join(token.to_bytes(4, "little") for token in prompt)).tobytes()
    new = NewRow(
        row=0, epoch=0, request_id="r", token_ids=tokens, num_prompt_tokens=len(prompt), sampling=SamplingState(),
        blocks=((0,),),
    )  # fmt: skip
    return plan(1, rows=(0,), epochs=(0,), starts=(0,), counts=(len(prompt),), new_rows=(new,))


class Bench:
    """The actor with both its mailboxes."""

    def __init__(self, worker: Any, **config: Any) -> None:
        self.plans: Mailbox[StepPlan, Never] = Mailbox("worker", 2)
        self.results: Mailbox[StepFinished, Never] = Mailbox("scheduler", 2)
        self.thread = StepThread("step")
        self.actor = WorkerActor(
            self.plans, self.results, worker, self.thread, SystemClock(), WorkerConfig(**config), max_plans_in_flight=2
        )

    async def result(self) -> StepResult:
        assert await self.results.wait()
        message = self.results.take()
        assert message is not None
        return message.result


async def test_results_follow_plans(fake_worker: Any, expected: Callable[[list[int], int], list[int]]) -> None:
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


async def test_what_a_step_raises_is_the_crash_itself(fake_worker: Any) -> None:
    fake_worker.poison = 6
    bench = Bench(fake_worker)
    await bench.plans.put(first_plan([5, 6, 7]))
    with pytest.raises(ValueError, match="poisoned"):
        await bench.actor.run()
    assert [message.step for message in bench.plans.abandon()] == [1]
    await bench.thread.close()


async def test_a_hung_step_fails_after_its_deadline(fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    bench = Bench(fake_worker, step_timeout=0.01)
    await bench.plans.put(first_plan([5]))
    with pytest.raises(WorkerCrashed, match=r"longer than 0\.01 s \(step_timeout\)"):
        await bench.actor.run()
    fake_worker.gate.set()
    assert await bench.thread.close()


async def test_a_reply_of_the_wrong_shape_is_refused(fake_worker: Any) -> None:
    class Liar:
        def launch(self, plan: StepPlan) -> int:
            return plan.step

        def collect(self, ticket: int) -> StepResult:
            return StepResult(step=ticket, engine_epoch=0, rows=(0,), epochs=(0,), token_counts=(2,), tokens=(1,))

    bench = Bench(Liar())
    await bench.plans.put(plan(1, rows=(0,), epochs=(0,), starts=(0,), counts=(1,)))
    with pytest.raises(WorkerCrashed, match="step 1"):
        await bench.actor.run()
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
