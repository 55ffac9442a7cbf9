"""Counting holds two threads of its own, its line is bounded, and a call that leaves the line holds nothing of it."""

import threading
from functools import partial

import anyio
import anyio.to_thread
import pytest

from troupellm.actors.input.long_texts import PARALLEL
from troupellm.protocol.errors import EngineOverloaded, QueueTimeout
from troupellm.server.host import counting
from troupellm.server.host.counting import Counting

pytestmark = pytest.mark.anyio


class Work:
    """Calls that end when the test says so."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Semaphore(0), threading.Event()
        self.lock = threading.Lock()
        self.running = self.most = self.done = 0

    def __call__(self) -> int:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        assert self.gate.wait(30)
        with self.lock:
            self.running -= 1
            self.done += 1
            return self.done


async def begun(work: Work) -> None:
    """Until as many calls run as may."""
    for _ in range(PARALLEL):
        assert await anyio.to_thread.run_sync(partial(work.begun.acquire, timeout=30))


async def test_counting_holds_no_more_than_its_own_threads():
    line, work = Counting(), Work()
    others = anyio.to_thread.current_default_thread_limiter()
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(line.run, "", 1, work)
        await begun(work)
        await anyio.wait_all_tasks_blocked()
        assert (line.inside, others.borrowed_tokens) == (8, 0)
        work.gate.set()
    assert (work.most, work.done, line.inside) == (PARALLEL, 8, 0)


async def test_a_full_line_refuses_and_moves_on(monkeypatch):
    monkeypatch.setattr(counting, "MOST_WAITING", 2)
    line, work = Counting(), Work()
    async with anyio.create_task_group() as group:
        for _ in range(2 + PARALLEL):
            group.start_soon(line.run, "", 1, work)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineOverloaded, match="2 requests wait"):
            await line.run("", 1, work)
        work.gate.set()
    assert work.done == 2 + PARALLEL
    assert await line.run("", 1, work) == work.done


async def test_a_count_that_waits_too_long_gets_a_queue_timeout(monkeypatch):
    line, work = Counting(), Work()
    async with anyio.create_task_group() as group:
        for _ in range(PARALLEL):
            group.start_soon(line.run, "", 1, work)
        await begun(work)
        monkeypatch.setattr(counting, "WAIT_SECONDS", 0.0)
        with pytest.raises(QueueTimeout) as caught:
            await line.run("", 1, work)
        assert (caught.value.code, line.inside) == ("server_is_overloaded", PARALLEL)
        work.gate.set()
    assert (work.done, line.inside) == (PARALLEL, 0)


async def test_a_count_that_leaves_the_line_holds_no_place():
    line, work = Counting(), Work()
    async with anyio.create_task_group() as group:
        for _ in range(PARALLEL):
            group.start_soon(line.run, "", 1, work)
        await begun(work)
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(line.run, "", 1, work)
            await anyio.wait_all_tasks_blocked()
            assert line.inside == PARALLEL + 1
            leaving.cancel_scope.cancel()
        assert line.inside == PARALLEL
        work.gate.set()
    assert (work.done, line.inside) == (PARALLEL, 0)


async def test_an_error_of_a_count_reaches_its_caller_and_frees_its_place():
    line = Counting()
    with pytest.raises(ZeroDivisionError):
        await line.run("", 1, partial(divmod, 1, 0))
    assert await line.run("", 1, partial(divmod, 7, 2)) == (3, 1)
