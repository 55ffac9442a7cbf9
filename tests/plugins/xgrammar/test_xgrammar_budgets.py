"""The budgets of a grammar in xgrammar, which has no limits of its own: time for tokens and masks.

By a clock that says so; the package need not be there.
"""

from typing import Any

import pytest

from troupellm.models.structured_outputs.backend import MASK_SECONDS
from troupellm.models.structured_outputs.guided_row import MOST_DEBT
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.params.guide import GuideProgram
from troupellm.tests.support.engines.inside import guided_rows_of
from troupellm.tests.support.guides.guide_crowd import VOCAB, Crowd
from troupellm_xgrammar import backend as xgrammar_backend
from troupellm_xgrammar.backend import (
    ACCEPT_SECONDS,
    ACCEPT_WEIGHT,
    HOPELESS_SECONDS,
    XGrammar,
    XGrammarMatcher,
)

TOKEN = 64
"""The only one that may come."""


class Inner:
    """A matcher of the library, each of whose tokens moves a clock."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.filled = 0

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        self._clock[0] += self._seconds
        return token_id == TOKEN

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens

    def fork(self) -> "Inner":
        return Inner(self._clock, self._seconds)

    def fill_next_token_bitmask(self, masks: Any, index: int) -> bool:
        self.filled += 1
        masks[index] = 0
        masks[index, TOKEN // 32] = 1 << TOKEN % 32
        return True


class Timed(XGrammar):
    """Grammars are the seconds that each token takes."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.special_tokens = {}

    def compile(self, text: str) -> XGrammarMatcher:
        return XGrammarMatcher(Inner(self._clock, float(text)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(xgrammar_backend, "thread_time", lambda: now[0])
    return now


@pytest.fixture
def crowd(clock, tokenizer, helper) -> Crowd:
    assert TOKEN not in tokenizer.eos_token_ids
    library = GuideLibrary(lambda: tokenizer, VOCAB, 1)
    library._backends["xgrammar"] = Timed(clock)
    return Crowd(library, tokenizer, helper)


def taking(seconds: float) -> GuideProgram:
    return GuideProgram(backend="xgrammar", text=repr(seconds), field="structured_outputs.grammar")


def inner(crowd: Crowd, row: int) -> Inner:
    made = guided_rows_of(crowd.guides)[row].matcher
    assert isinstance(made, XGrammarMatcher)
    return made.inner


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_row_whose_tokens_take_long_ends_alone(crowd: Crowd, num_rows: int):
    beyond = 2e-3
    crowd.add(0, taking(ACCEPT_SECONDS + beyond))
    for row in range(1, num_rows):
        crowd.add(row, taking(ACCEPT_SECONDS / 2))
    for _ in range(int(MOST_DEBT / (ACCEPT_WEIGHT * beyond - MASK_SECONDS))):
        crowd.step(0)
    assert not crowd.errors
    for _ in range(3):
        crowd.step(0)
    assert list(crowd.errors) == [0]
    assert crowd.errors[0].startswith("structured_outputs.grammar: the guide of this output cannot go on: ")
    assert "too ambiguous" in crowd.errors[0]


def test_behind_a_token_that_took_all_time_no_mask_is_begun(crowd: Crowd):
    crowd.add(0, taking(ACCEPT_SECONDS + 2 * HOPELESS_SECONDS / ACCEPT_WEIGHT))
    crowd.step(0)
    made = inner(crowd, 0)
    assert made.filled == 1
    crowd.step(0)
    assert made.filled == 1
    assert "too ambiguous" in crowd.errors[0]


def test_tokens_that_are_taken_in_again_are_charged_by_each_of_them(clock):
    """A row that goes on elsewhere has many at once, none of which took long."""
    quick = XGrammarMatcher(Inner(clock, ACCEPT_SECONDS / 2))
    assert quick.accept([TOKEN] * 1000)
    assert quick.owed() == 0.0


def test_drafts_that_are_taken_back_leave_no_charge(clock):
    matcher = XGrammarMatcher(Inner(clock, 2 * ACCEPT_SECONDS))
    each = ACCEPT_WEIGHT * ACCEPT_SECONDS
    assert matcher.accept([TOKEN])
    assert matcher.accept([TOKEN, TOKEN])
    matcher.rollback(2)
    assert matcher.owed() == pytest.approx(each)
    assert matcher.owed() == 0.0
    assert matcher.accept([TOKEN])
    assert matcher.copy().owed() == 0.0
    assert matcher.owed() == pytest.approx(each)
    matcher.rollback(1)  # it was paid for
    assert matcher.owed() == 0.0
