"""The shell: one loop, credits, order of what it sends, and its end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Never

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.scheduler.actor import Scheduler
from troupellm.protocol.messages.metrics import MetricsMessage, RequestStats
from troupellm.protocol.messages.output import OutputMessage, StepOutput
from troupellm.protocol.messages.scheduler import (
    AbortRequest,
    ReaderPaused,
    ReaderResumed,
    SchedulerControl,
    SchedulerMessage,
    StepFinished,
    StopStringMet,
)
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.environment.hand_clock import HandClock
from troupellm.tests.support.scheduler.oracle import Oracle, Reader, make_core, ready, stream_of, submission

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


class Stage:
    """The scheduler between hand-operated neighbours."""

    def __init__(self, plans: int = 1, metrics_capacity: int = 64, **config: Any) -> None:
        self.inbox: Mailbox[SchedulerMessage, SchedulerControl] = Mailbox("scheduler", 16)
        self.worker: Mailbox[StepPlan, Never] = Mailbox("worker", plans)
        self.output: Mailbox[OutputMessage, Never] = Mailbox("output", 64)
        self.metrics: Mailbox[MetricsMessage, Never] = Mailbox("metrics", metrics_capacity)
        self.clock = HandClock(1.0)
        core = make_core(max_plans_in_flight=plans, **config)
        self.actor = Scheduler(core, self.inbox, self.worker, self.output, self.metrics, self.clock)
        made = ready()
        self.oracle = Oracle(made.block_size, made.num_blocks)
        self.reader = Reader()

    async def settle(self) -> None:
        """Let the actor handle what it was given, then read what it said."""
        for _ in range(5):
            await checkpoint()
        while (message := self.output.take()) is not None:
            assert isinstance(message, StepOutput)
            self.reader.read(message)

    async def answer(self) -> int:
        """Answer the plans that were sent; how many."""
        await self.settle()
        count = 0
        while (plan := self.worker.take()) is not None:
            self.oracle.launch(plan)
            count += 1
        for _ in range(count):
            assert self.inbox.offer(StepFinished(self.oracle.collect()))
        await self.settle()
        return count


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[Stage]:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(stage.actor.run)
            yield stage
            stage.inbox.close()


@pytest.mark.parametrize("plans", [1, 2])
async def test_requests_run_to_their_end(plans: int) -> None:
    async with running(Stage(plans)) as stage:
        for request in (1, 2):
            await stage.inbox.put(submission(request, [request, *PROMPT]))
        while await stage.answer():
            pass
        for request in (1, 2):
            assert stage.reader.streams[100 * request] == stream_of([request, *PROMPT], 0, 8, frozenset())
            assert stage.reader.closed[request].error is None
        stats = []
        while (entry := stage.metrics.take()) is not None:
            stats.append(entry)
        assert sum(isinstance(entry, RequestStats) for entry in stats) == 2
        assert len(stats) == 2 + stage.actor.snapshot().steps


@pytest.mark.parametrize("plans", [1, 2])
async def test_no_more_plans_than_credits(plans: int) -> None:
    async with running(Stage(plans)) as stage:
        await stage.inbox.put(submission(1, PROMPT))
        await stage.settle()
        assert stage.worker.depth == plans
        assert stage.actor.snapshot().plans_in_flight == plans


async def test_an_abort_overtakes_waiting_requests() -> None:
    async with running(Stage(max_num_seqs=1)) as stage:
        await stage.inbox.put(submission(1, PROMPT))
        await stage.settle()
        await stage.inbox.put(submission(2, PROMPT))
        stage.inbox.control(AbortRequest(1))
        await stage.answer()
        assert stage.reader.closed[1].error is not None
        while await stage.answer():
            pass
        assert stage.reader.closed[2].error is None


async def test_control_messages_reach_the_core() -> None:
    async with running(Stage()) as stage:
        await stage.inbox.put(submission(1, PROMPT, rows=2))
        await stage.answer()
        stage.inbox.control(ReaderPaused(1))
        while await stage.answer():
            pass
        assert stage.actor.snapshot().paused + stage.actor.snapshot().waiting == 2
        stage.inbox.control(ReaderResumed(1))
        stage.inbox.control(StopStringMet(100))
        while await stage.answer():
            pass
        assert stage.reader.closed[1].error is None
        assert stage.reader.streams[101] == stream_of(PROMPT, 1, 8, frozenset())


async def test_refusals_and_aborts_are_told_without_a_step() -> None:
    async with running(Stage(max_num_seqs=1)) as stage:
        await stage.inbox.put(submission(1, [1] * 64))
        await stage.settle()
        assert stage.reader.closed[1].error is not None
        assert stage.worker.depth == 0


async def test_a_deadline_is_kept_while_nothing_else_happens() -> None:
    async with running(Stage(max_num_seqs=1)) as stage:
        await stage.inbox.put(submission(1, PROMPT))
        await stage.inbox.put(submission(2, PROMPT, deadline=1.02))
        await stage.settle()
        stage.clock.time = 2.0
        assert await stage.output.wait()
        await stage.settle()
        assert 2 in stage.reader.closed


async def test_a_full_metrics_sink_is_not_waited_for() -> None:
    async with running(Stage(metrics_capacity=1)) as stage:
        await stage.inbox.put(submission(1, PROMPT))
        while await stage.answer():
            pass
        assert 1 in stage.reader.closed
        assert stage.metrics.snapshot().dropped > 0


async def test_a_worker_without_room_is_a_bug_that_is_raised() -> None:
    stage = Stage()
    stage.worker.capacity = 0
    await stage.inbox.put(submission(1, PROMPT))
    with pytest.raises(RuntimeError, match="no room for a plan"):
        await stage.actor.run()


async def test_a_closed_output_box_ends_it_quietly() -> None:
    """At the engine's end, when the output actor has gone before it."""
    stage = Stage()
    stage.output.close()
    await stage.inbox.put(submission(1, []))  # refused at once, which is an output
    with anyio.fail_after(10):
        await stage.actor.run()
