"""A reset of an outer tier: in its turn when nothing else is, and answered whatever becomes of it."""

import threading

from transfers import move

from tests.models.offload.test_tier import Bench, bench, quick
from troupellm.models.offload.store import StoreError

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
