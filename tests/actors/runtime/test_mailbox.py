"""The mailbox on every backend: order, lanes, bounds, and that no cancellation loses a message."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


def drain(mailbox: Mailbox[Any, Any]) -> list[Any]:
    taken = []
    while (message := mailbox.take()) is not None:
        taken.append(message)
    return taken


async def test_messages_come_out_in_order_and_control_overtakes() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 4)
    await mailbox.put(1)
    assert mailbox.offer(2)
    mailbox.control("stop")
    assert await mailbox.wait()
    assert drain(mailbox) == ["stop", 1, 2]


async def test_offer_refuses_when_full_and_counts() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    assert [mailbox.offer(number) for number in range(4)] == [True, True, False, False]
    snapshot = mailbox.snapshot()
    assert (snapshot.name, snapshot.depth, snapshot.capacity, snapshot.messages, snapshot.dropped) == ("m", 2, 2, 2, 2)


async def test_a_full_control_lane_drops_and_counts() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1, control_capacity=1)
    mailbox.control("a")
    mailbox.control("b")
    assert mailbox.snapshot().dropped == 1
    assert drain(mailbox) == ["a"]


async def test_producers_wait_in_line() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(mailbox.put, number)
            await anyio.wait_all_tasks_blocked()
        taken = []
        while len(taken) < 6:
            await mailbox.wait()
            taken += drain(mailbox)
    assert taken == list(range(6))


async def test_an_offer_does_not_overtake_a_waiting_producer() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1)
    await mailbox.put(0)
    async with anyio.create_task_group() as group:
        group.start_soon(mailbox.put, 1)
        await anyio.wait_all_tasks_blocked()
        assert mailbox.take() == 0
        assert not mailbox.offer(2)
        assert mailbox.take() == 1


async def test_a_wait_for_messages_ends_after_its_timeout() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1)
    assert not await mailbox.wait(0.001)
    assert not await mailbox.wait(0)
    mailbox.offer(1)
    assert await mailbox.wait(0)


async def test_close_lets_the_consumer_drain_and_turns_producers_away() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1)
    await mailbox.put(0)
    refused = []

    async def late() -> None:
        try:
            await mailbox.put(1)
        except MailboxClosed:
            refused.append(1)

    async with anyio.create_task_group() as group:
        group.start_soon(late)
        await anyio.wait_all_tasks_blocked()
        mailbox.close()
    assert refused == [1]
    assert await mailbox.wait()
    assert drain(mailbox) == [0]
    assert not await mailbox.wait()
    with pytest.raises(MailboxClosed):
        mailbox.offer(2)
    with pytest.raises(MailboxClosed):
        await mailbox.put(2)


async def test_close_wakes_a_waiting_consumer() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: _expect_end(mailbox))
        await anyio.wait_all_tasks_blocked()
        mailbox.close()


async def _expect_end(mailbox: Mailbox[Any, Any]) -> None:
    assert not await mailbox.wait()
    assert mailbox.closed


async def test_abandon_returns_what_is_owed_and_admits_those_in_line() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    await mailbox.put(0)
    await mailbox.put(1)
    assert mailbox.take() == 0
    await mailbox.put(2)
    mailbox.control("c")
    async with anyio.create_task_group() as group:
        group.start_soon(mailbox.put, 3)
        await anyio.wait_all_tasks_blocked()
        assert mailbox.abandon() == [0, "c", 1, 2]
    assert drain(mailbox) == [3]


async def test_a_handled_message_is_no_longer_owed() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    await mailbox.put(0)
    drain(mailbox)
    assert not await mailbox.wait(0)
    assert mailbox.abandon() == []


async def test_a_second_consumer_is_a_bug() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    async with anyio.create_task_group() as group:
        group.start_soon(mailbox.wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="consumer already"):
            await mailbox.wait()
        mailbox.close()


async def test_a_cancelled_consumer_loses_nothing() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 2)
    async with anyio.create_task_group() as group:
        group.start_soon(mailbox.wait)
        await anyio.wait_all_tasks_blocked()
        mailbox.offer(1)
        group.cancel_scope.cancel()
    assert await mailbox.wait()
    assert drain(mailbox) == [1]


async def test_a_producer_cancelled_in_line_leaves_it() -> None:
    mailbox: Mailbox[int, str] = Mailbox("m", 1)
    await mailbox.put(0)
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def leaves() -> None:
            with scope:
                await mailbox.put(1)

        group.start_soon(leaves)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(mailbox.put, 2)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert drain(mailbox) == [0, 2]


class TestNativeCancel:
    """`Task.cancel()` reaches a task that was already woken; asyncio only."""

    @pytest.fixture(autouse=True)
    def _asyncio_only(self, any_backend: tuple[str, object]) -> None:
        if any_backend[0] != "asyncio":
            pytest.skip("there are no native cancels elsewhere")

    async def cancelled_after(self, call: Callable[[], Awaitable[object]], wake: Callable[[], object]) -> None:
        task = asyncio.ensure_future(call())
        await checkpoint()
        await checkpoint()
        wake()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_of_a_woken_consumer(self) -> None:
        mailbox: Mailbox[int, str] = Mailbox("m", 2)
        await self.cancelled_after(mailbox.wait, lambda: mailbox.offer(1))
        assert await mailbox.wait()
        assert drain(mailbox) == [1]

    async def test_of_a_woken_producer(self) -> None:
        mailbox: Mailbox[int, str] = Mailbox("m", 1)
        await mailbox.put(0)
        await self.cancelled_after(lambda: mailbox.put(1), mailbox.take)
        assert drain(mailbox) == [1]
        await mailbox.put(2)
        assert drain(mailbox) == [2]

    async def test_of_a_producer_in_line(self) -> None:
        mailbox: Mailbox[int, str] = Mailbox("m", 1)
        await mailbox.put(0)
        await self.cancelled_after(lambda: mailbox.put(1), lambda: None)
        assert drain(mailbox) == [0]

    async def test_of_a_consumer_with_a_timeout(self) -> None:
        mailbox: Mailbox[int, str] = Mailbox("m", 2)
        await self.cancelled_after(lambda: mailbox.wait(60.0), lambda: mailbox.offer(1))
        assert drain(mailbox) == [1]


async def test_nothing_is_lost_or_doubled_under_random_cancellation() -> None:
    """Producers that are cancelled at every possible step: what was accepted comes out once."""
    mailbox: Mailbox[int, str] = Mailbox("m", 3)
    accepted: list[int] = []
    taken: list[int] = []

    async def produce(number: int, steps: int) -> None:
        with anyio.CancelScope() as scope:
            for step in range(10):
                if step == steps:
                    scope.cancel()
                await mailbox.put(100 * number + step)
                accepted.append(100 * number + step)

    async def consume() -> None:
        while await mailbox.wait():
            taken.extend(drain(mailbox))
            await checkpoint()

    async with anyio.create_task_group() as consumers:
        consumers.start_soon(consume)
        async with anyio.create_task_group() as producers:
            for number in range(12):
                producers.start_soon(produce, number, number)
        mailbox.close()
    assert len(set(taken)) == len(taken)
    assert set(accepted) <= set(taken)
    assert len(taken) == mailbox.snapshot().messages
