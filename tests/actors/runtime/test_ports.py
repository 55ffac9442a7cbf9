"""Threads as ports: results, errors, cancellation, and that closing gives every thread back."""

import threading

import anyio
import pytest

from troupellm.actors.runtime.ports import LoopPort, SeededRandomness, SystemRandomness
from troupellm.actors.runtime.thread_pool import StepThread, ThreadPool

pytestmark = pytest.mark.anyio


async def test_calls_run_in_order_on_one_thread() -> None:
    thread = StepThread("step")
    names = [await thread.run(lambda: threading.current_thread().name) for _ in range(3)]
    assert set(names) == {"step"}
    assert await thread.close()


async def test_an_error_reaches_the_caller() -> None:
    thread = StepThread("step")
    with pytest.raises(ZeroDivisionError):
        await thread.run(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.run(next, iter(()))
    assert await thread.run(divmod, 7, 2) == (3, 1)
    await thread.close()


async def test_cancelling_drops_a_call_that_has_not_begun() -> None:
    thread = StepThread("step")
    gate = threading.Event()
    ran: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(thread.run, gate.wait)
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(0.01):
            await thread.run(ran.append, "dropped")
        gate.set()
    await thread.run(ran.append, "kept")
    assert ran == ["kept"]
    await thread.close()


async def test_cancelling_a_running_call_leaves_the_thread_usable() -> None:
    thread = StepThread("step")
    gate = threading.Event()
    with anyio.move_on_after(0.01) as scope:
        await thread.run(gate.wait)
    assert scope.cancelled_caught
    gate.set()
    assert await thread.run(int, "5") == 5
    assert await thread.close()


async def test_closing_gives_up_on_a_call_that_hangs() -> None:
    thread = StepThread("step")
    gate = threading.Event()
    with anyio.move_on_after(0.01):
        await thread.run(gate.wait)
    assert not await thread.close(0.01)
    threads = [other for other in threading.enumerate() if other.name == "step"]
    assert all(other.daemon for other in threads)  # left behind, it does not keep the program from ending
    gate.set()
    for other in threads:
        other.join(5)


async def test_closing_leaves_no_thread() -> None:
    before = threading.active_count()
    pool = ThreadPool("pool", 3)
    for _ in range(5):
        await pool.run(int, "1")
    assert threading.active_count() == before + 3
    assert await pool.close()
    assert await pool.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        await pool.run(int, "1")


async def test_posting_from_a_thread_runs_on_the_loop() -> None:
    thread = StepThread("step")
    port = LoopPort()
    done = anyio.Event()
    seen: list[str] = []

    def on_loop() -> None:
        seen.append(threading.current_thread().name)
        done.set()

    await thread.run(port.post, on_loop)
    await done.wait()
    assert seen == [threading.current_thread().name]
    await thread.close()


async def test_an_outcome_waits_for_a_good_moment_in_the_next_posted_call() -> None:
    thread, told, order = StepThread("step"), LoopPort(), list[str]()
    gate, second_begun, moment = threading.Event(), threading.Event(), threading.Event()
    heard, all_heard = anyio.Event(), anyio.Event()
    tell = thread.hold()

    def first() -> str:
        gate.wait()
        return "first"

    def second() -> str:
        second_begun.set()
        moment.wait()
        tell()
        told.post(all_heard.set)
        return "second"

    def done(result: str | None, error: BaseException | None) -> None:
        order.append(str(result))
        if result == "second":
            heard.set()

    thread.post(first, done)
    thread.post(second, done)
    gate.set()
    second_begun.wait()
    told.post(lambda: order.append("while the second computes"))
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()
    moment.set()
    await all_heard.wait()
    await heard.wait()
    assert order == ["while the second computes", "first", "second"]
    await thread.close()


async def test_an_outcome_waits_neither_for_other_calls_nor_for_those_that_never_tell() -> None:
    thread, order = StepThread("step"), list[str]()
    gate, heard = threading.Event(), anyio.Event()
    thread.hold()

    def done(result: str | None, error: BaseException | None) -> None:
        order.append(result or type(error).__name__)
        if error is not None:
            heard.set()

    def fails() -> str:
        raise ZeroDivisionError

    def waits() -> str:
        gate.wait()
        return "waited"

    thread.post(waits, done)
    thread.post(lambda: "never tells", done)
    thread.post(fails, done)
    gate.set()
    await heard.wait()
    assert order == ["waited", "never tells", "ZeroDivisionError"]
    gate.clear()
    thread.post(waits, done)

    async def look() -> None:
        order.extend(await thread.run(lambda: ["run"]))

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        await anyio.lowlevel.checkpoint()
        gate.set()
    assert order[3:] == ["waited", "run"]
    await thread.close()


async def test_a_call_without_an_outcome_is_not_told_of() -> None:
    thread, heard = StepThread("step"), anyio.Event()
    order: list[str | None] = []

    def done(result: str | None, error: BaseException | None) -> None:
        order.append(result)
        heard.set()

    thread.post(lambda: None, done)
    thread.post(lambda: "an outcome", done)
    await heard.wait()
    assert order == ["an outcome"]
    await thread.close()


async def test_closing_tells_what_is_held() -> None:
    thread, order, gate = StepThread("step"), list[str | None](), threading.Event()
    thread.hold()

    def waits() -> str:
        gate.wait()
        return "waited"

    thread.post(waits, lambda result, error: order.append(result))
    with anyio.move_on_after(0):
        await thread.close(0)
    gate.set()
    for other in threading.enumerate():
        if other.name == "step":
            other.join(60)
    await anyio.lowlevel.checkpoint()
    assert order == ["waited"]


async def test_seeded_randomness_repeats_and_the_systems_does_not() -> None:
    first, second = SeededRandomness(3), SeededRandomness(3)
    assert [first.seed() for _ in range(3)] == [second.seed() for _ in range(3)]
    fresh = SystemRandomness()
    assert fresh.seed() != fresh.seed()
    assert len(fresh.token(4)) == 8
