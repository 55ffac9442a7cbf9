"""A reset of an outer tier: it runs in its turn, alone, and is always answered."""

import threading

import pytest
from transfers import move

from tests.models.kv_offload.test_tier import Bench, bench, quick
from troupellm.models.kv_offload.store import StoreError

__all__ = ["bench", "quick"]


def test_a_reset_gives_up_what_is_there_and_holds_back_what_follows(bench: Bench) -> None:
    gate, inside = threading.Event(), threading.Event()
    bench.keep(b"k", 7)
    bench.driver.ok(move("store", block=0, place=5))

    def hang() -> None:
        inside.set()
        gate.wait()

    bench.store.trouble = hang
    late = move("spill", place=5, key=b"late", tier=1)
    bench.driver.step(late)
    inside.wait()
    waiting = [move("fetch", place=place, key=b"k", tier=1) for place in (1, 2, 3)]
    reset, after = move("reset", place=-1, tier=1), move("fetch", place=4, key=b"k", tier=1)
    bench.driver.step(*waiting, reset, after)
    assert {answer.error for answer in bench.driver.wait(late, *waiting)} == {"cancelled"}
    assert not {reset.transfer, after.transfer} & bench.driver.done.keys(), "somebody is still in the store"
    bench.store.trouble = lambda: None
    gate.set()
    bench.driver.wait(reset, after)
    assert bench.driver.done[reset.transfer].ok
    assert bench.driver.done[after.transfer].error == "miss"
    assert bench.store.kept == {}, "what was being put was there before the reset was its turn"
    bench.keep(b"k", 8)


def test_a_reset_that_fails_is_answered_and_leaves_the_tier_alone(bench: Bench) -> None:
    bench.keep(b"k", 7)

    def broken() -> None:
        raise StoreError("unreachable")

    bench.store.trouble = broken
    assert bench.driver.error(move("reset", place=-1, tier=1)) == "unreachable"
    assert bench.driver.error(move("reset", place=-1, tier=1)) == "disabled"
    bench.store.trouble = lambda: None
    bench.driver.wait_for_report(1, disabled=False)
    bench.driver.ok(move("reset", place=-1, tier=1))
    assert bench.store.kept == {}


def test_a_store_that_takes_no_blocks_is_reset_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.keep(b"k", 7)

    def full(*_: object) -> None:
        raise StoreError("full")

    for call in ("put", "probe"):
        monkeypatch.setattr(bench.store, call, full)
    assert bench.driver.error(move("spill", place=0, key=b"l", tier=1)) == "full"
    assert bench.driver.error(move("reset", place=-1, tier=1)) == "disabled"
    while bench.store.kept:
        bench.driver.step()
    assert bench.driver.tiers[1].disabled


@pytest.mark.parametrize("hangs", [False, True])
def test_a_reset_that_is_owed_is_tried_once_more_in_the_end(hangs: bool) -> None:
    bench = Bench()
    bench.keep(b"k", 7)
    gate, inside = bench.hang()
    if not hangs:
        gate.set()
    late = move("fetch", place=1, key=b"k", tier=1)
    bench.driver.step(late)
    inside.wait()

    def broken() -> None:
        raise StoreError("unreachable")

    bench.store.trouble = broken
    reset = move("reset", place=-1, tier=1)
    bench.driver.step(reset)
    if hangs:  # the reset waits for the fetch
        assert reset.transfer not in bench.driver.done
    else:
        assert bench.driver.wait(reset)[0].error == "unreachable"
    assert bench.store.kept
    bench.store.trouble = gate.set
    bench.engine.close()
    assert bench.store.kept == {}


def test_a_reset_that_was_carried_out_is_owed_no_more(bench: Bench) -> None:
    def broken() -> None:
        raise StoreError("unreachable")

    bench.store.trouble = broken
    assert bench.driver.error(move("reset", place=-1, tier=1)) == "unreachable"
    bench.store.trouble = lambda: None
    bench.driver.wait_for_report(1, disabled=False)
    bench.keep(b"k", 7)
    bench.engine.rest()
    bench.engine.attach(lambda host_buffer: bench.mover)
    bench.store.trouble = broken
    assert bench.driver.error(move("spill", place=0, key=b"l", tier=1)) == "unreachable"
    bench.store.trouble = lambda: None
    bench.driver.wait_for_report(1, disabled=False)
    assert bench.store.kept.keys() == {b"k"}
