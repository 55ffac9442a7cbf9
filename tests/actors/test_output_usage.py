"""What an answer is said to have used, where a stop string ends it before the scheduler hears of that."""

from typing import Any

import msgspec
import pytest
from output_bench import TABLES, Slot, closed, ids, opened, step

from troupellm.actors.output_core import OutputCore
from troupellm.protocol.output import RequestClosed, RowFinished


@pytest.fixture
def core() -> OutputCore:
    return OutputCore(TABLES, lambda message: None, 0.0)


def over(tokens: int) -> RequestClosed:
    """The end of a request for which the scheduler counts so many tokens."""
    message = closed()
    return msgspec.structs.replace(message, usage=msgspec.structs.replace(message.usage, completion_tokens=tokens))


def told(slot: Any) -> int:
    return int(slot.closed[0].completion_tokens)


def test_tokens_behind_a_stop_string_in_its_own_step_are_not_used(core: OutputCore) -> None:
    slot = Slot()
    core.handle(opened(slot, stop_strings=("\n",)), 0.0)
    drawn = [*ids("a"), *ids("\n"), *ids("bcd")]
    core.handle(step({10: drawn}), 0.0)
    core.handle(step({}, closed=(over(len(drawn)),)), 0.0)
    assert slot.tokens() == (*ids("a"), *ids("\n"))
    assert told(slot) == len(slot.tokens())


def test_tokens_of_steps_that_were_under_way_at_a_stop_string_are_not_used(core: OutputCore) -> None:
    slot = Slot()
    core.handle(opened(slot, rows=(10, 11), stop_strings=("\n",)), 0.0)
    first, second = [*ids("a"), *ids("\n"), *ids("bcd")], ids("the quick fox jumps")
    for place, token in enumerate(second):
        tokens = {10: first[place : place + 1], 11: [token]}
        core.handle(step({row: given for row, given in tokens.items() if given}), 0.0)
    drawn = len(first[: len(second)]) + len(second)
    core.handle(step({}, finished=(RowFinished(11, "length"),), closed=(over(drawn),)), 0.0)
    assert slot.ends(0) == [("stop", "\n")]
    assert slot.tokens(1) == tuple(second)
    assert told(slot) == len(slot.tokens(0)) + len(second) < drawn


def test_an_end_that_comes_behind_a_stop_string_counts_nothing_of_its_step(core: OutputCore) -> None:
    slot = Slot()
    core.handle(opened(slot, stop_strings=("\n",)), 0.0)
    core.handle(step({10: [*ids("a"), *ids("\n")]}), 0.0)
    core.handle(step({10: ids("b")}, finished=(RowFinished(10, "length"),)), 0.0)
    drawn = len(ids("a") + ids("\n") + ids("b"))
    core.handle(step({}, closed=(over(drawn),)), 0.0)
    assert slot.ends() == [("stop", "\n")]
    assert told(slot) == len(slot.tokens()) < drawn
