"""An outer tier whose store fails, hangs and lies: answered once, left alone, tried again, and no place is harmed."""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from transfers import Driver, move

from troupellm.models.kv_offload import operations, store_tier
from troupellm.models.kv_offload.block_copy import BlockMover
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.store import BlockStore, StoreCorrupt, StoreError, StoreMiss
from troupellm.models.kv_offload.transfers import TransferEngine

SIZE, PLACES, BLOCKS = 256, 16, 8


class ArrayMover(BlockMover):
    """The device is an array."""

    is_storing = False

    def __init__(self, host_buffer: HostBuffer) -> None:
        self.blocks = np.zeros((BLOCKS, SIZE), np.uint8)
        self._host_buffer = host_buffer
        self.broken = False

    def begin_stores(self, blocks: Sequence[int]) -> dict[int, np.ndarray]:
        return {block: self.blocks[block].copy() for block in blocks}

    def store(self, begun: dict[int, np.ndarray], moves: Sequence[object]) -> None:
        if self.broken:
            raise RuntimeError("copies fail")
        for each in moves:
            self._host_buffer[each.place][:] = begun[each.block]

    def forget(self, block: int) -> None:
        """Nothing is kept."""

    def settle(self, blocks: set[int] | None = None) -> None:
        """Nothing is kept."""

    def load(self, moves: Sequence[object]) -> None:
        for each in moves:
            self.blocks[each.block] = self._host_buffer[each.place]


class DictStore(BlockStore):
    """In memory; the function put into `trouble` runs in every call."""

    name = "dictionary"

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.trouble: Callable[[], None] = lambda: None
        self.probes = 0
        self.closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        self.trouble()
        return next((count for count, key in enumerate(keys) if key not in self.kept), len(keys))

    def put(self, key: bytes, data: memoryview) -> None:
        self.trouble()
        self.kept[key] = bytes(data)

    def get(self, key: bytes, into: memoryview) -> None:
        content = self.kept.get(key)
        if content is None:
            raise StoreMiss
        into[: SIZE // 2] = content[: SIZE // 2]
        self.trouble()
        into[:] = content

    def reset(self) -> None:
        self.trouble()
        self.kept.clear()

    def probe(self) -> None:
        self.probes += 1
        self.trouble()

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.host_buffer = HostBuffer(PLACES, SIZE)
        self.mover, self.store = ArrayMover(self.host_buffer), DictStore()
        self.engine = TransferEngine(self.mover, self.host_buffer, [self.store], num_blocks=BLOCKS, timeout=60.0)
        self.driver = Driver(self.engine)
        for place in range(PLACES):  # it may be memory that another arena has left
            self.host_buffer[place][:] = 0

    def hurry(self, timeout: float = 0.0) -> None:
        """From here on, and in what is under way, every operation of the store is late; or none is."""
        self.engine._tiers[0]._timeout = timeout

    def hang(self) -> tuple[threading.Event, threading.Event]:
        """Every operation of the store waits for the first of these; the second says that one does."""
        gate, inside = threading.Event(), threading.Event()

        def wait() -> None:
            inside.set()
            gate.wait()

        self.store.trouble = wait
        return gate, inside

    def keep(self, key: bytes, value: int) -> None:
        """A block of this value goes out to the store."""
        self.mover.blocks[0] = value
        self.driver.ok(move("store", block=0, place=0))
        self.driver.ok(move("spill", place=0, key=key, tier=1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "FIRST_PROBE_SECONDS", 0.001)
    monkeypatch.setattr(store_tier, "LAST_PROBE_SECONDS", 0.004)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.close()
    assert bench.store.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("troupellm-kv")]


def test_out_and_back(bench: Bench) -> None:
    for number in range(6):
        bench.keep(b"key%d" % number, number + 1)
    assert bench.driver.count(b"key0", b"key1", b"key9", b"key2") == 2
    bench.driver.ok(*(move("fetch", place=number + 1, key=b"key%d" % number, tier=1) for number in range(6)))
    bench.driver.ok(*(move("load", block=number + 1, place=number + 1) for number in range(6)))
    assert [set(row) for row in bench.mover.blocks[1:7].tolist()] == [{number + 1} for number in range(6)]
    assert bench.driver.error(move("fetch", place=0, key=b"nothing", tier=1)) == "miss"
    assert bench.driver.tiers[1].failed == 0
    assert all(answer.seconds > 0.0 for answer in bench.driver.done.values() if answer.ok)


def test_a_failing_copy_is_answered(bench: Bench) -> None:
    bench.mover.broken = True
    assert bench.driver.error(move("store", block=0, place=0)) == "copies fail"
    bench.mover.broken = False
    bench.driver.ok(move("store", block=0, place=0))
    assert bench.driver.tiers[0].failed == 1


@pytest.mark.parametrize(
    "error", [StoreError("unreachable"), OSError(28, "No space left on device"), ZeroDivisionError("a plug-in's bug")]
)
@pytest.mark.parametrize("kind", ["spill", "fetch", "lookup"])
def test_an_error_disables_the_tier_until_a_probe_goes_well(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, kind: str
) -> None:
    bench.keep(b"k", 7)

    def fail() -> None:
        raise error

    bench.store.trouble = fail
    if kind == "lookup":
        assert bench.driver.count(b"k") == 0
    else:
        bench.driver.error(move(kind, place=0, key=b"k", tier=1))
    report = bench.driver.wait_for_report(1, disabled=True)
    assert report.disabled in {"unreachable", "No space left on device", "ZeroDivisionError"}
    assert report.disablings == 1
    assert bench.driver.error(move("fetch", place=1, key=b"k", tier=1)) == "disabled"
    assert bench.driver.error(move("spill", place=0, key=b"k", tier=1)) == "disabled"
    assert bench.driver.count(b"k") == 0
    before = bench.store.probes
    while bench.store.probes < before + 3:
        bench.driver.step()
    assert [record.message for record in caplog.records if "left alone" in record.message] == [
        f"KV tier dictionary is left alone: {report.disabled}; next try in 0.001 s"
    ]
    bench.store.trouble = lambda: None
    bench.driver.wait_for_report(1, disabled=False)
    bench.driver.ok(move("fetch", place=1, key=b"k", tier=1))
    assert set(bench.host_buffer[1].tolist()) == {7}


def test_a_corrupt_block_is_a_miss_and_no_error(bench: Bench) -> None:
    bench.keep(b"k", 7)

    def lie() -> None:
        raise StoreCorrupt("wrong checksum")

    bench.store.trouble = lie
    before = bench.host_buffer[1].copy()
    assert bench.driver.error(move("fetch", place=1, key=b"k", tier=1)) == "corrupt"
    assert (bench.host_buffer[1] == before).all()
    assert (bench.driver.tiers[1].corrupt, bench.driver.tiers[1].disabled) == (1, "")


def test_a_place_that_was_damaged_is_not_spread(bench: Bench) -> None:
    bench.keep(b"k", 7)
    bench.host_buffer[0][5] = 8
    assert bench.driver.error(move("spill", place=0, key=b"l", tier=1)) == "corrupt"
    assert b"l" not in bench.store.kept


def test_a_late_fetch_writes_to_nobodys_place(bench: Bench) -> None:
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    late = move("fetch", place=1, key=b"k", tier=1)
    bench.driver.step(late)
    inside.wait()
    bench.hurry()
    assert [answer.error for answer in bench.driver.wait(late)] == ["disabled"]
    assert bench.driver.wait_for_report(1, disabled=True).disabled == "slower than 0 s"
    bench.hurry(60.0)
    bench.mover.blocks[0] = 9
    bench.driver.ok(move("store", block=0, place=1))
    bench.store.trouble = lambda: None
    gate.set()
    report = bench.driver.wait_for_report(1, disabled=False)
    while report.late < 1:
        bench.driver.step()
        report = bench.driver.tiers[1]
    bench.driver.ok(move("load", block=5, place=1))
    assert set(bench.mover.blocks[5].tolist()) == {9}


def test_a_late_spill_keeps_what_it_was_given(bench: Bench) -> None:
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    asked = move("spill", place=0, key=b"late", tier=1)
    bench.driver.step(asked)
    inside.wait()
    bench.hurry()
    assert [answer.error for answer in bench.driver.wait(asked)] == ["disabled"]
    bench.hurry(60.0)
    bench.mover.blocks[0] = 9
    bench.driver.ok(move("store", block=0, place=0))  # the place is another block's now
    bench.store.trouble = lambda: None
    gate.set()
    bench.driver.wait_for_report(1, disabled=False)
    while bench.driver.tiers[1].late < 1:
        bench.driver.step()
    assert set(bench.store.kept[b"late"]) == {7}


def test_all_threads_hang_and_the_step_goes_on(bench: Bench) -> None:
    gate = threading.Event()
    bench.keep(b"k", 7)
    bench.store.trouble = lambda: gate.wait() and None
    asked = [move("fetch", place=place, key=b"k", tier=1) for place in range(1, 9)]
    bench.hurry()
    assert {answer.error for answer in bench.driver.all(*asked)} == {"disabled"}
    bench.driver.ok(move("store", block=0, place=0), move("load", block=1, place=0))
    bench.hurry(60.0)
    gate.set()
    bench.store.trouble = lambda: None
    bench.driver.wait_for_report(1, disabled=False)
    bench.driver.ok(move("fetch", place=2, key=b"k", tier=1))


def test_writes_go_on_beside_a_thread_that_hangs(bench: Bench) -> None:
    gate, inside = threading.Event(), threading.Event()
    bench.keep(b"k", 7)

    def hang() -> None:
        inside.set()
        gate.wait()

    bench.store.trouble = hang
    asked = move("fetch", place=1, key=b"k", tier=1)
    bench.driver.step(asked)
    inside.wait()
    bench.store.trouble = lambda: None
    bench.hurry()
    assert [answer.error for answer in bench.driver.wait(asked)] == ["disabled"]
    bench.hurry(60.0)
    bench.driver.wait_for_report(1, disabled=False)
    bench.keep(b"other", 9)
    assert set(bench.store.kept[b"other"]) == {9}
    gate.set()


def test_cancelled_transfers_are_answered_once(bench: Bench) -> None:
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    asked = [move("fetch", place=place, key=b"k", tier=1) for place in range(1, 9)]
    spill = move("spill", place=0, key=b"l", tier=1)
    bench.driver.step(*asked, spill)
    inside.wait()
    numbers = [each.transfer for each in (*asked, spill)]
    bench.driver.step(cancelled=(*numbers, 10**9))
    while any(number not in bench.driver.done for number in numbers):
        bench.driver.step()
    assert {bench.driver.done[number].error for number in numbers} == {"cancelled"}
    bench.driver.step(cancelled=numbers)
    bench.store.trouble = lambda: None
    gate.set()
    bench.driver.ok(move("fetch", place=2, key=b"k", tier=1))
    assert set(bench.host_buffer[1].tolist()) != {7}


def test_what_a_plan_begins_and_gives_up_at_once_is_given_up(bench: Bench) -> None:
    bench.keep(b"k", 7)
    gate, _ = bench.hang()
    asked = move("fetch", place=1, key=b"k", tier=1)
    try:
        bench.driver.step(asked, cancelled=(asked.transfer,))
        assert bench.driver.done[asked.transfer].error == "cancelled"
    finally:
        gate.set()


def test_what_the_queue_has_no_room_for_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "MOST_WAITING", 3)
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    asked = [move("fetch", place=place, key=b"k", tier=1) for place in range(1, 9)]
    bench.driver.step(asked[0])
    inside.wait()
    bench.driver.step(*asked[1:])
    busy = [answer for answer in bench.driver.done.values() if answer.error == "busy"]
    assert 3 <= len(busy) <= 4
    gate.set()
    while any(each.transfer not in bench.driver.done for each in asked):
        bench.driver.step()
    assert bench.driver.tiers[1].refused == len(busy)


def test_a_store_that_does_not_begin_well_is_tried_again() -> None:
    store = DictStore()

    def fail() -> None:
        raise StoreError("another engine uses this folder")

    store.trouble = fail
    host_buffer = HostBuffer(PLACES, SIZE)
    engine = TransferEngine(ArrayMover(host_buffer), host_buffer, [store], num_blocks=BLOCKS, timeout=60.0)
    driver = Driver(engine)
    assert driver.wait_for_report(1, disabled=True).disabled == "another engine uses this folder"
    store.trouble = lambda: None
    driver.wait_for_report(1, disabled=False)
    engine.close()


def test_many_reads_may_take_longer_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (store_tier, operations):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(store_tier, "THREADS", 1)
    bench = Bench()
    bench.store.kept[b"k"] = bytes(SIZE)

    def slow() -> None:
        now[0] += 25.0
        bench.engine._tiers[0].watch()

    bench.store.trouble = slow
    bench.driver.ok(*(move("fetch", place=place, key=b"k", tier=1) for place in range(1, 9)))
    assert bench.driver.tiers[1].disablings == 0
    bench.engine.close()


def test_resting_answers_everything(bench: Bench) -> None:
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    asked = [move("fetch", place=place, key=b"k", tier=1) for place in range(1, 9)]
    bench.driver.step(*asked)
    inside.wait()
    bench.engine.rest()
    bench.engine.attach(lambda host_buffer: bench.mover)
    bench.driver.step()
    assert {bench.driver.done[each.transfer].error for each in asked} == {"cancelled"}
    gate.set()


def test_a_plan_without_rows_waits_only_while_something_is_under_way(bench: Bench) -> None:
    assert bench.engine.collect(idle=True) is not None
    assert not bench.engine.collect(idle=False).transfers
    assert torch.get_num_threads() >= 1
