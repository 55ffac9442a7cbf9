"""Answers that a stop string ends before the scheduler hears of it: later tokens are dropped."""

from typing import Any

import msgspec
import pytest

from troupellm.actors.output.core import OutputCore
from troupellm.actors.output.stop_strings import StopStrings
from troupellm.protocol.errors import RequestFailed
from troupellm.protocol.messages.output import RequestClosed, RowFailed, RowFinished
from troupellm.tests.support.scheduler.output_bench import TABLES, Slot, closed, ids, opened, step


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


def test_a_row_that_fails_behind_a_stop_string_fails_nothing(core: OutputCore) -> None:
    slot = Slot()
    core.handle(opened(slot, stop_strings=("\n",)), 0.0)
    core.handle(step({10: [*ids("a"), *ids("\n")]}), 0.0)
    failed = RowFailed(10, "logits are not numbers", "engine_request_failed")
    core.handle(step({}, failed=(failed,), closed=(closed(error=RequestFailed("logits are not numbers")),)), 0.0)
    assert slot.ends() == [("stop", "\n")]
    assert slot.error is None
    assert slot.closed is not None


def test_a_row_that_fails_beside_one_that_met_a_stop_string_fails_both(core: OutputCore) -> None:
    slot = Slot()
    core.handle(opened(slot, rows=(10, 11), stop_strings=("\n",)), 0.0)
    core.handle(step({10: [*ids("a"), *ids("\n")], 11: ids("b")}), 0.0)
    failed = RowFailed(11, "logits are not numbers", "engine_request_failed")
    core.handle(step({}, failed=(failed,), closed=(closed(error=RequestFailed("logits are not numbers")),)), 0.0)
    assert isinstance(slot.error, RequestFailed)
    assert slot.closed is None


def test_tokens_behind_a_stop_string_are_not_used_where_another_row_fails() -> None:
    ends: list[RequestClosed] = []
    core = OutputCore(TABLES, lambda message: None, 0.0, ends.append)
    core.handle(opened(Slot(), rows=(10, 11), stop_strings=("\n",)), 0.0)
    shown, behind, beside = [*ids("a"), *ids("\n")], ids("bcd"), ids("b")
    core.handle(step({10: [*shown, *behind], 11: beside}), 0.0)
    failed = RowFailed(11, "logits are not numbers", "engine_request_failed")
    end = over(len(shown) + len(behind) + len(beside))
    end = msgspec.structs.replace(end, error=RequestFailed("logits are not numbers"))
    core.handle(step({}, failed=(failed,), closed=(end,)), 0.0)
    assert [told.usage.completion_tokens for told in ends] == [len(shown) + len(beside)]


def test_a_stop_string_is_found_inside_the_beginning_of_a_longer_one() -> None:
    strings = StopStrings(["abcd", "bc"])
    _, read, found = strings.scan(0, "xabc!")
    assert (read, found) == (4, "bc")
