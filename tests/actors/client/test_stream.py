"""A stream's edges: entered twice, ended while it enters, read with timeouts, mapped and left."""

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import troupellm
from troupellm.protocol.params.outputs import Delta
from troupellm.tests.support.engines.inside import system_of

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def test_two_tasks_that_enter_at_once_submit_once(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of(max_num_seqs=1, max_num_queued_reqs=0) as engine:
        async with anyio.create_task_group() as group, engine.stream([9], max_tokens=100) as holder:
            stream = engine.stream(PROMPT, max_tokens=3)
            group.start_soon(stream.opened)
            group.start_soon(stream.opened)
            await anyio.wait_all_tasks_blocked()
            assert system_of(engine).admission.waiting == 1
            fake_worker.gate.set()
            await holder.cancel()
        assert len((await stream.collect()).token_ids) == 3


async def test_cancelling_while_it_waits_for_a_place(engine_of: Any, fake_worker: Any, quiet: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of(max_num_seqs=1, max_num_queued_reqs=0) as engine:
        async with anyio.create_task_group() as group, engine.stream([9], max_tokens=5):
            stream = engine.stream(PROMPT, max_tokens=3)

            async def enter() -> None:
                with pytest.raises(troupellm.RequestAborted):
                    await stream.opened()

            group.start_soon(enter)
            await anyio.wait_all_tasks_blocked()
            await stream.cancel()
            assert system_of(engine).admission.waiting == 0
            fake_worker.gate.set()
        await quiet(engine)


async def test_reads_that_time_out_leave_nothing_behind(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of() as engine, engine.stream(PROMPT, max_tokens=3) as stream:
        await stream.opened()
        for _ in range(5):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(stream)
        assert stream._outbox._waiters == []
        fake_worker.gate.set()


async def test_leaving_a_map_aborts_all_before_it_waits(engine_of: Any, fake_worker: Any, quiet: Any) -> None:
    async with engine_of(max_num_seqs=8) as engine:
        results = engine.map([[20 + index] for index in range(8)], concurrency=8, max_tokens=400)
        group_of = system_of(engine).requests

        async def read() -> None:
            async for _ in results:
                pass

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            while len(group_of) < 8:
                await checkpoint()
            open_requests = list(group_of)
            first = open_requests[0]
            aborted: list[int] = []
            first.when_terminal(lambda: aborted.append(sum(outbox.cancelled for outbox in open_requests)))
            group.cancel_scope.cancel()
        assert aborted == [8]
        await quiet(engine)


async def test_a_map_never_waits_for_a_reader(engine_of: Any) -> None:
    async with engine_of(stream_budget_tokens=4) as engine:
        with anyio.fail_after(10):
            answers = [done async for _, done in engine.map([PROMPT], streaming=True, max_tokens=50)]
        assert len(answers[0].token_ids) == 50


async def test_no_max_tokens_is_up_to_the_context(engine_of: Any, make_worker: Any) -> None:
    async with engine_of(make_worker(max_model_len=40)) as engine:
        assert len((await engine.generate(PROMPT, max_tokens=None)).token_ids) == 37
        assert len((await engine.generate(PROMPT, temperature=None)).token_ids) == 16


async def test_pieces_may_be_taken_at_once_and_ends_come_by_waking(engine_of: Any) -> None:
    async with engine_of() as engine:
        alone = await engine.generate(PROMPT, max_tokens=40)
        async with engine.stream(PROMPT, max_tokens=40) as stream:
            await stream.opened()
            swift: list[Delta] = []
            order: list[Delta] = []

            def take(deltas: list[Delta]) -> None:
                swift.extend(deltas)
                order.extend(deltas)

            stream.set_sink(SimpleNamespace(take=take, ready=lambda: len(order) % 3 != 2))
            while deltas := await stream.wake():
                order += deltas
            assert 0 < len(swift) < len(order) - 1
            assert [delta.finish_reason for delta in swift] == [None] * len(swift)
            assert order[-1].finish_reason == "length"
            assert tuple([token for delta in order for token in delta.token_ids]) == alone.token_ids


@pytest.mark.parametrize("at", ["take", "ready"])
async def test_an_error_of_a_sink_ends_its_own_stream_only(engine_of: Any, quiet: Any, at: str) -> None:
    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    async with engine_of() as engine:
        async with engine.stream(PROMPT, max_tokens=40) as other, engine.stream(PROMPT, max_tokens=40) as stream:
            await stream.opened()
            stream.set_sink(SimpleNamespace(**{"take": [].extend, "ready": lambda: True} | {at: broken}))
            with pytest.raises(ZeroDivisionError):
                [await stream.wake() for _ in range(40)]
            assert await stream.wake() is None
            await stream.cancel()
            assert len((await other.collect()).token_ids) == 40
        await quiet(engine)
