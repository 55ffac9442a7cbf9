"""Copies of blocks on a device are kept for as long as a store needs them."""

import weakref
from collections.abc import Sequence

import pytest

from tests.models.kv_offload.test_tier import Bench, bench, quick
from troupellm.tests.support.kv.transfers import move

__all__ = ["bench", "quick"]


class Copies(dict):  # type: ignore[type-arg]
    """That can be seen to go."""


def test_copies_go_with_the_last_store_that_needs_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next one comes, which may be never; cancelled ones, too."""
    made = list[weakref.ref[Copies]]()
    begin = bench.mover.begin_stores

    def begun(blocks: Sequence[int]) -> Copies:
        copies = Copies(begin(blocks))
        made.append(weakref.ref(copies))
        return copies

    monkeypatch.setattr(bench.mover, "begin_stores", begun)
    bench.driver.ok(move("store", block=0, place=0), move("store", block=1, place=1))
    asked = move("store", block=2, place=2)
    bench.driver.step(asked, cancelled=(asked.transfer,))
    bench.engine.rest()
    assert [copies() for copies in made] == [None, None]
