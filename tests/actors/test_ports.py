"""Threads as ports: results, errors, cancellation, and that closing gives every thread back."""

import threading

import anyio
import pytest

from troupellm.actors.ports import LoopPort, SeededRandomness, StepThread, SystemRandomness, ThreadPool

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


async def test_seeds() -> None:
    first, second = SeededRandomness(3), SeededRandomness(3)
    assert [first.seed() for _ in range(3)] == [second.seed() for _ in range(3)]
    fresh = SystemRandomness()
    assert fresh.seed() != fresh.seed()
    assert len(fresh.token(4)) == 8
