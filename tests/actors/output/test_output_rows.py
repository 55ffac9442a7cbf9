"""Steps that name the same rows again, others, or the same when something has happened to one of them."""

import random
from typing import Any

import pytest

from troupellm.actors.output.core import OutputCore
from troupellm.protocol.messages.output import RowFailed, RowFinished
from troupellm.tests.support.scheduler.output_bench import TABLES, Slot, closed, ids, opened, step

LETTERS = [token for letter in "abcdefgh" for token in ids(letter)]


def with_rows(flush_interval: float, *slots: Slot, **settings: Any) -> OutputCore:
    """The first slot has row 10, the second row 20, ..."""
    core = OutputCore(TABLES, lambda message: None, flush_interval)
    for number, slot in enumerate(slots, start=1):
        core.handle(opened(slot, number, (10 * number,), **settings), 0.0)
    return core


def test_the_first_token_is_sent_at_once_and_later_ones_with_the_other_rows() -> None:
    early, late = Slot(), Slot()
    core = with_rows(0.02, early, late)
    core.handle(step({10: ids("a")}), 0.0)
    for letter in "bcd":
        core.handle(step({10: ids(letter), 20: ids(letter)}), 0.001)
    assert [delta.text for delta in late.deltas] == ["b"]
    list(core.flush(0.03))
    assert [delta.text for delta in early.deltas] == ["a", "bcd"]
    assert [delta.text for delta in late.deltas] == ["b", "cd"]


def test_tokens_of_a_failed_request_are_discarded_though_its_row_is_named() -> None:
    failing, other = Slot(), Slot()
    core = with_rows(0.0, failing, other)
    for letter in "abc":
        core.handle(step({10: ids(letter), 20: ids(letter)}), 0.0)
    failed = (RowFailed(10, "no", "x"),)
    core.handle(step({10: ids("d"), 20: ids("d")}, failed=failed), 0.0)
    for letter in "ef":
        core.handle(step({10: ids(letter), 20: ids(letter)}), 0.0)
    list(core.flush(0.0))
    assert failing.text() == "abcd"
    assert other.text() == "abcdef"


def test_several_tokens_for_one_of_those_that_are_named_again() -> None:
    one, other = Slot(), Slot()
    core = with_rows(0.0, one, other)
    for token_ids in (LETTERS[:1], LETTERS[1:2], LETTERS[2:5], LETTERS[5:6], []):
        core.handle(step({10: token_ids, 20: LETTERS[:1]}), 0.0)
    list(core.flush(0.0))
    assert one.text() == "abcdef"
    assert other.text() == "aaaaa"


def test_an_interval_of_tokens_is_counted_in_steps_that_name_the_same_rows() -> None:
    one, other = Slot(), Slot()
    core = with_rows(0.0, one, other, stream_interval=3)
    texts = []
    for letter in "abcdefg":
        core.handle(step({10: ids(letter), 20: ids(letter)}), 0.0)
        list(core.flush(0.0))
        texts.append(one.text())
    assert texts == ["a", "a", "a", "abcd", "abcd", "abcd", "abcdefg"]
    assert other.text() == "abcdefg"


@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_gets_its_own_tokens_in_order_over_random_steps(seed: int) -> None:
    """Sequences come, end and fail; a failed one is named once more, before the scheduler has heard of it."""
    chance = random.Random(seed)
    core = OutputCore(TABLES, lambda message: None, 0.02)
    slots: dict[int, Slot] = {}
    given: dict[int, list[int]] = {}
    live: list[int] = []
    late: list[int] = []
    for turn in range(150):
        now = 0.004 * turn
        if len(slots) < 12 and chance.random() < 0.15:
            row = 10 + len(slots)
            slots[row], given[row] = Slot(), []
            core.handle(opened(slots[row], row, (row,), stop_strings=chance.choice([(), ("never",)])), now)
            live.append(row)
        named = live + late
        if chance.random() < 0.2:
            named = chance.sample(named, chance.randint(0, len(named)))
        burst = 3 if chance.random() < 0.1 else 1
        tokens = {row: chance.choices(LETTERS, k=chance.randint(1, burst)) for row in named}
        for row in live:
            given[row] += tokens.get(row, [])
        late = []
        more: dict[str, Any] = {}
        leaving = chance.choice(live) if live and chance.random() < 0.06 else None
        if leaving is not None:
            live.remove(leaving)
            if chance.random() < 0.5:
                more = {"failed": (RowFailed(leaving, "no", "x"),)}
                late = [leaving]
            else:
                more = {"finished": (RowFinished(leaving, "length"),), "closed": (closed(leaving),)}
        core.handle(step(tokens, **more), now)
        list(core.flush(now))
    list(core.flush(1000.0))
    assert {row: slot.tokens() for row, slot in slots.items()} == {row: tuple(known) for row, known in given.items()}
    letters = dict(zip(LETTERS, "abcdefgh", strict=True))
    for row, slot in slots.items():
        assert slot.text() == "".join(letters[token] for token in given[row])
