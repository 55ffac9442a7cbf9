"""Snapshots of KV events: a reader who has missed some comes to know what one knows who has heard all."""

import random
from collections.abc import Iterable

import anyio
import pytest

from troupellm.actors.kv_cache.events import KVEventLog
from troupellm.actors.kv_cache.stored_events import Standing, StoredBlock
from troupellm.protocol.messages.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsLost,
    KVEvent,
    SnapshotBegins,
)
from troupellm.tests.support.engines.inside import order_of

pytestmark = pytest.mark.anyio
MEDIA = ("device", "host")


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Router:
    """Knows what it was told."""

    def __init__(self) -> None:
        self.known: set[tuple[str, int, str]] = set()
        self.gaps = 0

    def hear(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.known.add((event.medium, event.group, event.key))
                case BlocksRemoved():
                    self.known.discard((event.medium, event.group, event.key))
                case BlocksCleared():
                    self.known = {known for known in self.known if known[0] != event.medium}
                case EventsLost():
                    self.gaps += 1
                case SnapshotBegins():
                    self.known.clear()


def happen(log: KVEventLog, chance: random.Random, count: int) -> None:
    for _ in range(count):
        told = log.of(chance.choice(MEDIA))  # type: ignore[arg-type]
        name, group = key(chance.randrange(60)), chance.randrange(2)
        if chance.random() < 0.01:
            told.cleared()
        elif chance.random() < 0.5:
            told.removed(name, group)
        else:
            told.stored(name, group, key(99), bytes(4))
    log.flush()


class LateReader:
    """Reads little by little, and takes a snapshot, in parts, when it hears that it has missed something."""

    def __init__(self, log: KVEventLog) -> None:
        self.log, self.router = log, Router()
        self.position, self.begun = 0, None

    def read(self, most: int) -> bool:
        """False: there was nothing."""
        if self.begun is not None:
            self._take_part(self.position, self.begun)
            return True
        events = self.log.read(self.position, most)
        self.router.hear(events)
        self.position = events[-1].seq if events else self.position
        if any(isinstance(event, EventsLost) for event in events):
            self._take_part(0, None)
        return bool(events)

    def _take_part(self, after: int, begun: int | None) -> None:
        read = self.log.read_snapshot(after, begun, most=7)
        self.router.hear(read.events)
        self.position, self.begun = read.last, read.snapshot


@pytest.mark.parametrize("seed", range(8))
def test_a_router_that_missed_events_agrees_with_one_that_heard_all(seed: int) -> None:
    chance = random.Random(seed)
    log, whole = KVEventLog(40, 1), KVEventLog(100_000, 1)
    ours, theirs = random.Random(seed + 1), random.Random(seed + 1)
    late, patient = LateReader(log), Router()
    for _ in range(300):
        count = chance.choice((0, 1, 5, 80))
        happen(log, ours, count)
        happen(whole, theirs, count)
        late.read(chance.choice((1, 50)))
    while late.read(50):
        pass
    patient.hear(whole.read(0, most=100_000))
    assert late.router.gaps > 1
    assert late.router.known == patient.known
    assert log.snapshot().findable == len(patient.known)


def test_a_snapshot_comes_in_parts_and_tells_each_block_once() -> None:
    log = KVEventLog(3, 2, with_tokens=True)
    device, host = log.of("device"), log.of("host")
    for number in range(1, 6):
        device.stored(key(number), 0, key(number - 1), b"\x05\0\0\0\x06\0\0\0")
    host.stored(key(2), 0)
    device.removed(key(3), 0)
    device.stored(key(1), 0, key(0), b"\x05\0\0\0\x06\0\0\0")
    first = log.read_snapshot(most=2)
    assert first.events[0] == SnapshotBegins(seq=8, blocks=5)
    assert [event.seq for event in first.events[1:]] == [2, 4]
    assert (first.last, first.snapshot) == (4, 8)
    device.removed(key(5), 0)
    second = log.read_snapshot(first.last, first.snapshot, most=2)
    assert [event.seq for event in second.events] == [6, 8]
    told = second.events[0]
    assert isinstance(told, BlocksStored)
    assert (told.medium, told.parent, told.token_ids) == ("host", key(1).hex(), (5, 6)), "as the device told it"
    last = log.read_snapshot(second.last, second.snapshot, most=2)
    assert (last.events, last.last, last.snapshot) == ((), 8, None)
    assert [event.seq for event in log.read(last.last)] == [9]


def test_a_snapshot_of_another_engine_begins_anew() -> None:
    log = KVEventLog(3, 1)
    log.of("device").stored(key(1), 0)
    read = log.read_snapshot(500, 900)
    assert [event.seq for event in read.events] == [1, 1]
    assert (read.last, read.snapshot) == (1, None)


def test_no_more_is_kept_than_there_are_blocks() -> None:
    standing = Standing()
    for number in range(1, 20_000):
        standing.add(number, StoredBlock("device", 0, key(number % 10)))
    assert len(standing) == len(standing._number) == 10
    assert len(order_of(standing)) < 2000
    standing.clear("host")
    assert len(standing.page(0, 20_000, 100)) == 10
    standing.clear("device")
    assert len(standing) == len(order_of(standing)) == 0


async def test_a_router_that_follows_gets_a_snapshot_after_each_gap() -> None:
    log, router = KVEventLog(5, 1), Router()
    chance = random.Random(4)
    happen(log, chance, 30)
    following = log.follow(snapshot=True)
    router.hear([await anext(following)])
    happen(log, chance, 30)
    log.close()
    with anyio.fail_after(30):
        async for event in following:
            router.hear([event])
    assert router.gaps == 1
    assert len(router.known) == log.snapshot().findable
