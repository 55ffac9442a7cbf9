"""KV events: what the block pool tells, and what fast, slow and late readers hear of it."""

import random

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.kv_cache.block_pool import BlockPool, in_group
from troupellm.actors.kv_cache.events import MOST_READERS, KVEventLog
from troupellm.actors.kv_offload.eviction import make_policy
from troupellm.actors.kv_offload.host_slots import HostTier
from troupellm.actors.kv_offload.tier import TierBlock
from troupellm.protocol.messages.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, EventsLost, KVEvent
from troupellm.protocol.messages.snapshot import KVEventsSnapshot

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fill(log: KVEventLog, count: int) -> None:
    told = log.of("device")
    for number in range(count):
        told.stored(key(number), 0, key(number + 1), bytes(4))
    log.flush()


def numbers(events: list[KVEvent]) -> list[int]:
    return [event.seq for event in events]


def heard(log: KVEventLog) -> set[tuple[str, int]]:
    """The keys in groups that a reader of all events takes to be there."""
    known: set[tuple[str, int]] = set()
    for event in log.read(0, most=100_000):
        match event:
            case BlocksStored():
                assert (event.key, event.group) not in known
                known.add((event.key, event.group))
            case BlocksRemoved():
                known.remove((event.key, event.group))
            case BlocksCleared():
                known.clear()
    return known


def test_events_say_what_they_were_told() -> None:
    log = KVEventLog(10, 2, with_tokens=True)
    device, host = log.of("device"), log.of("host")
    device.stored(key(1), 3, key(0), b"\x05\0\0\0\x06\0\0\0")
    host.stored(key(1), 0)
    device.removed(key(1), 3)
    host.cleared()
    assert log.read(0) == [
        BlocksStored(
            seq=1, medium="device", group=3, key=key(1).hex(), parent=key(0).hex(), num_tokens=2, token_ids=(5, 6)
        ),
        BlocksStored(seq=2, medium="host", group=0, key=key(1).hex(), parent="", num_tokens=2),
        BlocksRemoved(seq=3, medium="device", group=3, key=key(1).hex()),
        BlocksCleared(seq=4, medium="host"),
    ]


def test_token_ids_are_told_only_if_asked_for() -> None:
    log = KVEventLog(10, 1)
    fill(log, 1)
    (event,) = log.read(0)
    assert isinstance(event, BlocksStored)
    assert event.token_ids == ()


def test_a_slow_reader_hears_how_many_it_has_missed() -> None:
    log = KVEventLog(5, 1)
    fill(log, 3)
    assert numbers(log.read(0)) == [1, 2, 3]
    assert numbers(log.read(2)) == [3]
    assert log.read(3) == []
    fill(log, 9)
    first, *rest = log.read(3)
    assert first == EventsLost(seq=7, dropped=4)
    assert numbers(rest) == [8, 9, 10, 11, 12]
    assert numbers(log.read(7)) == [8, 9, 10, 11, 12]
    assert numbers(log.read(8, most=2)) == [9, 10]
    assert log.snapshot() == KVEventsSnapshot(reported=12, kept=5, lost=4, waiting_readers=0, findable=9)


def test_a_number_of_another_engine_tells_all() -> None:
    log = KVEventLog(5, 1)
    fill(log, 3)
    assert numbers(log.read(1000)) == [1, 2, 3]


def test_memory_does_not_grow_with_events_or_readers() -> None:
    log = KVEventLog(100, 1)
    fill(log, 10_000)
    assert len(log._ring) == 100
    assert log.last == 10_000


def test_events_of_the_pool_name_the_blocks_that_it_can_find() -> None:
    log, chance = KVEventLog(100_000, 1), random.Random(0)
    pool = BlockPool(12, 2, log.of("device"))
    held: list[tuple[int, int]] = []
    for step in range(3000):
        if chance.random() < 0.5 and pool.num_available:
            group = chance.randrange(2)
            (block,) = pool.take(1, group)
            held.append((block, group))
            pool.cache_block(block, key(chance.randrange(40)), key(99), bytes(4))
        elif held:
            block, group = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.1:
                pool.forget(block)
            pool.release([block], group)
        if step % 1000 == 999:
            pool.forget_all()
    found = {(key(n).hex(), group) for n in range(40) for group in range(2) if pool.find(key(n), group) is not None}
    assert heard(log) == found
    assert log.last > 1000


def test_events_of_host_memory_name_the_blocks_that_it_can_find() -> None:
    log, chance = KVEventLog(100_000, 1), random.Random(1)
    host = HostTier(make_policy("lru", 8), log.of("host"))
    stores, loads = list[TierBlock](), list[TierBlock]()
    for step in range(4000):
        name = in_group(key(chance.randrange(20)), chance.randrange(2))
        match chance.randrange(4):
            case 0 if len(stores) < 4 and (block := host.prepare_store(name)) is not None:
                stores.append(block)
            case 1 if stores:
                host.complete_store(stores.pop(chance.randrange(len(stores))), ok=chance.random() < 0.8)
            case 2 if len(loads) < 3 and (block := host.prepare_load(name)) is not None:
                loads.append(block)
            case 3 if loads:
                host.complete_load(loads.pop(chance.randrange(len(loads))), ok=chance.random() < 0.8)
        if step % 1000 == 999:
            host.reset()
    found = {(key(n).hex(), g) for n in range(20) for g in range(2) if host.find(in_group(key(n), g)) is not None}
    assert heard(log) == found
    assert log.last > 500


async def test_followers_hear_everything_in_order_until_the_end() -> None:
    log, heard = KVEventLog(1000, 1), list[list[int]]()

    async def follow() -> None:
        heard.append([event.seq async for event in log.follow(0)])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(follow)
        for _ in range(5):
            await checkpoint()
            fill(log, 7)
        log.close()
    assert heard == [list(range(1, 36))] * 3


async def test_a_waiting_reader_is_woken_once_for_many_events_and_leaves_nothing_behind() -> None:
    log, woken = KVEventLog(10, 1), list[bool]()

    async def wait() -> None:
        woken.append(await log.wait(0))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        log.of("device").stored(key(0), 0)
        await anyio.wait_all_tasks_blocked()
        assert woken == []  # not before the scheduler's turn is over
        log.flush()
    assert woken == [True]
    with anyio.move_on_after(0):
        await log.wait(1)
    assert not await log.wait(1, 0.001)
    assert not log._waiting


async def test_no_more_wait_than_may() -> None:
    log = KVEventLog(10, 1)
    async with anyio.create_task_group() as group:
        for _ in range(MOST_READERS):
            group.start_soon(log.wait, 0)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="readers"):
            await log.wait(0)
        group.cancel_scope.cancel()
