"""One rest meets another: none is weakened by a second, and none is given up when that one fails."""

import threading
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol.errors import Conflict
from troupellm.tests.support.engines.resting import LENGTH, PROMPT, Reader, reading, stands_still

pytestmark = pytest.mark.anyio


async def test_a_wait_lets_nobody_go_on_who_stands_still(engine_of: Any, expected: Any, until: Any) -> None:
    """Neither paused nor asleep, in either order; it is refused, and what stood before still stands."""
    async with engine_of() as engine, reading(engine, until) as reader:
        await engine.sleep(1, "keep")
        for rest in (lambda: engine.pause("wait"), lambda: engine.sleep(1, "wait"), lambda: engine.sleep(2, "wait")):
            with pytest.raises(Conflict, match="stands still"):
                await rest()
            assert await stands_still(engine)
            assert (engine.snapshot().sleep_level, engine.is_paused) == (1, False)
        await engine.pause("keep")
        await engine.wake()
        for rest in (lambda: engine.sleep(0, "wait"), lambda: engine.sleep(2, "wait"), lambda: engine.pause("wait")):
            with pytest.raises(Conflict, match="stands still"):
                await rest()
            assert await stands_still(engine)
            assert engine.is_paused
            assert not engine.is_sleeping
        await engine.resume()
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)


async def test_a_rest_does_not_wait_for_requests_that_came_after_its_begin(
    engine_of: Any, expected: Any, until: Any
) -> None:
    """In every kind of rest, newcomers wait for its end."""
    async with engine_of() as engine, anyio.create_task_group() as group:
        for mode in ("wait", "keep", "abort"):
            await engine.pause(mode)
            newcomer = Reader()
            group.start_soon(newcomer.read, engine, [9, 9], 5)
            await until(lambda: engine.snapshot().scheduler.waiting == 1)
            await engine.pause("wait")
            await engine.sleep(2, "wait")
            await engine.wake()
            assert await stands_still(engine)
            assert newcomer.tokens == []
            await engine.resume()
            await until(lambda newcomer=newcomer: newcomer.finished)
            assert newcomer.tokens == expected([9, 9], 5)


@pytest.mark.parametrize("first", ["pause", "sleep"])
async def test_a_wait_under_way_is_not_cut_short(engine_of: Any, expected: Any, until: Any, first: str) -> None:
    async with engine_of() as engine, reading(engine, until) as reader, anyio.create_task_group() as group:
        over = anyio.Event()

        async def rest() -> None:
            await (engine.pause("wait") if first == "pause" else engine.sleep(1, "wait"))
            scheduler = engine.snapshot().scheduler
            assert (scheduler.running, scheduler.waiting) == (0, 0)
            over.set()

        group.start_soon(rest)
        await checkpoint()
        await checkpoint()
        for other in (engine.pause("keep"), engine.pause("wait"), engine.sleep(2, "keep"), engine.sleep(1, "wait")):
            with pytest.raises(Conflict, match="finish"):
                await other
        assert not engine.is_sleeping
        await over.wait()
        assert (engine.is_paused, engine.is_sleeping) == (first == "pause", first == "sleep")
        assert await stands_still(engine)
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)


async def leave(call: Any, checkpoints: int) -> None:
    """Have a call made, and cancel it after so much."""
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        for _ in range(checkpoints):
            await checkpoint()
        group.cancel_scope.cancel()


async def test_a_rest_again_that_fails_leaves_the_former(
    engine_of: Any, expected: Any, until: Any, fake_worker: Any
) -> None:
    """Refused by the worker, or left by its client at any point."""
    async with engine_of() as engine, reading(engine, until) as reader:
        await engine.sleep(1, "keep")
        fake_worker.refusal = RuntimeError("no")
        with pytest.raises(RuntimeError, match="no"):
            await engine.sleep(2, "keep")
        for checkpoints in range(6):
            with suppress(RuntimeError, BaseExceptionGroup):
                await leave(lambda: engine.sleep(2, "keep"), checkpoints)
            assert engine.snapshot().sleep_level == 1
            assert await stands_still(engine)
        fake_worker.refusal = None
        await engine.pause("keep")
        await engine.wake()
        for checkpoints in range(6):
            await leave(lambda: engine.pause("keep"), checkpoints)
            assert engine.is_paused
            assert await stands_still(engine)
        await engine.resume()
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)


async def test_a_pause_that_waits_comes_after_a_command(
    engine_of: Any, expected: Any, until: Any, fake_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has the worker for itself."""
    execute, begun, go = fake_worker.command, threading.Event(), threading.Event()

    def command(*order: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return execute(*order)

    monkeypatch.setattr(fake_worker, "command", command)
    async with engine_of() as engine, reading(engine, until) as reader:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.start_profile("traces"))
            await until(begun.is_set)
            group.start_soon(engine.pause, "wait")
            try:
                assert await stands_still(engine)
            finally:
                go.set()
        assert engine.is_paused
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)
        await engine.resume()


async def test_parts_that_were_woken_sleep_again(engine_of: Any, fake_worker: Any) -> None:
    async with engine_of() as engine:
        for tag, again in (("weights", 2), ("kv_cache", 1), ("kv_cache", 2)):
            await engine.sleep(2)
            await engine.wake([tag])
            assert (await engine.sleep(again)).freed == 5
            assert fake_worker.missing == {"weights", "kv_cache"}
            report = await engine.sleep(1)
            assert (report.level, report.freed) == (2, 0)
            await engine.wake()
            assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5
