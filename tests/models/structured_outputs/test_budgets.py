"""The budgets of a running grammar: ambiguity, states of a lexer, time. Only the request that exceeds one ends."""

from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from troupellm.models.structured_outputs import llguidance_backend
from troupellm.models.structured_outputs.backend import MASK_SECONDS
from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.guided_row import MOST_DEBT, GuidedRow
from troupellm.models.structured_outputs.llguidance_backend import FEW_MATCHERS, WATCHED_CALLS, LLGuidance
from troupellm.models.structured_outputs.matcher_cache import MOST_PROGRAMS, GuideLibrary
from troupellm.protocol.errors import GUIDE_SPENT
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.engines.inside import guided_rows_of
from troupellm.tests.support.guides.guide_crowd import VOCAB, Crowd
from troupellm.tests.support.servers.canary import resident_bytes

AMBIGUOUS = "start: e\ne: e e | e e e | /[a-z ]/"
"""Tiny, compiled at once, its first masks are cheap; each token multiplies the ways to read the text."""
HOSTILE = "([a-z ]|[A-Z])*[aeiou{letter}]([a-zA-Z ]){{20}}c"
"""A lexer's states double with each letter."""


def program(kind: str, source: str) -> GuideProgram:
    text = program_text(GuideSpec(kind=kind, source=source), "llguidance", 64, {})
    return GuideProgram(backend="llguidance", text=text, field=f"structured_outputs.{kind}")


def hostile(letter: str) -> GuideProgram:
    return program("regex", HOSTILE.format(letter=letter))


def fill(library: GuideLibrary, row: GuidedRow) -> np.ndarray:
    masks = np.zeros((1, library.mask_words), dtype=np.int32)
    assert row.matcher is not None
    library.backend("llguidance").fill([row.matcher], masks)
    return masks


def test_an_ambiguous_grammar_ends_before_its_masks_are_slow(library, tokenizer, helper):
    crowd = Crowd(library, tokenizer, helper)
    for row in range(16):
        crowd.add(row, program("grammar", AMBIGUOUS))
    crowd.add(16, program("choice", '["yes"]'))
    for _ in range(40):
        crowd.step(0)
    assert crowd.finished.pop(16) == "yes"
    assert len(crowd.errors) + len(crowd.finished) == 16  # no row is left
    assert len(crowd.errors) >= 8
    for error in crowd.errors.values():
        assert error.startswith("structured_outputs.grammar: the guide of this output cannot go on: ")


def exhausted(library: GuideLibrary, tokenizer, wanted: GuideProgram) -> GuidedRow:
    """A row that has used up what its program's matchers share, as the row sees it then."""
    generator = np.random.default_rng(0)
    for _ in range(60):
        row = GuidedRow(library, wanted)
        row.build([])
        for _ in range(60):
            bits = np.unpackbits(fill(library, row).view(np.uint8), bitorder="little")[:VOCAB]
            if row.matcher.error is not None:
                return row
            bits[sorted(tokenizer.eos_token_ids)] = 0
            row.accept([int(generator.choice(np.flatnonzero(bits)))])
    pytest.fail("its lexer has room for all of them")


def test_a_row_whose_program_was_used_up_says_so_and_the_next_row_has_a_new_one(tokenizer):
    library = GuideLibrary(lambda: tokenizer, VOCAB, 1)
    wanted = hostile("b")
    other = GuidedRow(library, wanted)
    other.build([])
    row = exhausted(library, tokenizer, wanted)
    broken = GuidedRow(library, wanted)
    broken.build([])
    fill(library, broken)
    fill(library, other)
    for each in (row, broken, other):  # all matchers of the program share it
        assert not each.check()
        failure = each.failure(7)
        assert failure.code == GUIDE_SPENT
        assert failure.message.startswith("structured_outputs.regex: the guide of this output cannot go on: lexer")
    assert library.num_built == 0
    fresh = GuidedRow(library, wanted)
    fresh.build([])
    fill(library, fresh)
    assert fresh.check()


def test_what_masks_had_forbidden_is_no_fault_of_the_request(library, tokenizer):
    row = GuidedRow(library, program("regex", "a+"))
    row.build(tokenizer.encode("b", add_special_tokens=False))
    assert row.failure(1).code == "engine_request_failed"


def test_rows_go_on_beside_those_that_use_up_their_program(library, tokenizer, helper):
    """Requests one after another for the same expression: each begins, however those before ended."""
    crowd = Crowd(library, tokenizer, helper)
    crowd.decoding = "replace"
    wanted = hostile("d")
    for begin in range(0, 48, 16):
        for row in range(begin, begin + 16):
            crowd.add(row, wanted)
        crowd.step(0)
        assert not [row for row in crowd.errors if row >= begin]
        for _ in range(20):
            crowd.step(0)


def test_C5_what_lexers_remember_is_bounded(tokenizer, helper):
    """Expressions that are never repeated, whose lexers grow as far as they may."""
    library = GuideLibrary(lambda: tokenizer, VOCAB, 1)
    exhausted(library, tokenizer, hostile("z"))
    resident = resident_bytes()
    for letter in "bcdfghjk":
        exhausted(library, tokenizer, hostile(letter))
    assert library.num_built == 9 <= MOST_PROGRAMS
    assert resident_bytes() - resident < 8 * 12 * 2**20
    assert llguidance_backend.MOST_LEXER_STATES * 9 * 350 < 64 * 2**20


@pytest.mark.parametrize("num_rows", [2, 2 * FEW_MATCHERS])
def test_a_row_whose_masks_take_long_ends_alone(tokenizer, helper, monkeypatch, num_rows):
    """By a clock that says so: every mask of one program takes 20 ms more than it may."""
    library = GuideLibrary(lambda: tokenizer, VOCAB, 2)
    crowd = Crowd(library, tokenizer, helper)
    plain = LLGuidance.fill
    slow: set[int] = set()
    filled = 0

    def timed(self, matchers, masks):
        nonlocal filled
        filled += 1
        plain(self, matchers, masks)
        taken = [MASK_SECONDS + 0.02 if id(matcher) in slow else MASK_SECONDS / 2 for matcher in matchers]
        return taken

    monkeypatch.setattr(LLGuidance, "fill", timed)
    for row in range(num_rows):
        crowd.add(row, program("regex", "[a-z]{200,}"))
    crowd.guides.filled(crowd.guides.begin([0]))
    slow.add(id(guided_rows_of(crowd.guides)[0].matcher))
    filled = 0
    for _ in range(int(MOST_DEBT / 0.02) - 1):
        crowd.step(0)
    assert not crowd.errors
    for _ in range(3):
        crowd.step(0)
    assert list(crowd.errors) == [0]
    assert "too ambiguous" in crowd.errors[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_are_timed_one_by_one_while_calls_are_slow_and_are_the_same(library, monkeypatch, threads):
    backend = LLGuidance(library.backend("llguidance")._tokens, threads)
    matchers = [backend.compile(program("regex", f"[a-z]{{{number},90}}").text) for number in range(1, 12)]
    plain, timed = (np.zeros((len(matchers), library.mask_words), dtype=np.int32) for _ in range(2))

    def slow_from(seconds):
        for name in ("SLOW_SECONDS", "MASK_SECONDS"):
            monkeypatch.setattr(llguidance_backend, name, seconds)

    slow_from(1e9)
    assert not backend.fill(matchers, plain)
    for few in range(1, FEW_MATCHERS + 1):  # they always are
        assert len(backend.fill(matchers[:few], plain[:few])) == few
    slow_from(0.0)  # so that all are slow
    assert not backend.fill(matchers, plain)
    seconds = backend.fill(matchers, timed)
    assert len(seconds) == len(matchers)
    assert all(taken > 0 for taken in seconds)
    assert (plain == timed).all()
    slow_from(1e9)
    for _ in range(WATCHED_CALLS):
        assert backend.fill(matchers, timed)
    assert not backend.fill(matchers, timed)


def test_the_debt_of_a_row_shrinks_with_untimed_masks(library, helper, tokenizer):
    crowd = Crowd(library, tokenizer, helper)
    for row in range(FEW_MATCHERS + 2):
        crowd.add(row, program("regex", "[a-z]{80,90}"))
    crowd.step(0)
    guided = guided_rows_of(crowd.guides)[0]
    guided.debt = 2.5 * MASK_SECONDS
    for _ in range(3):
        crowd.step(0)
    assert guided.debt == 0.0
    assert not crowd.errors


class SlowMatcher:
    """A matcher each of whose masks moves a clock by more than it may."""

    def __init__(self, inner: LLMatcher, clock: list[float]) -> None:
        self._inner = inner
        self._clock = clock

    def unsafe_compute_mask_ptr(self, place: int, num_bytes: int) -> None:
        self._clock[0] += MASK_SECONDS + 0.02
        self._inner.unsafe_compute_mask_ptr(place, num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_slow_row_is_found_among_others_whose_masks_are_filled_with_its_own(tokenizer, helper, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(llguidance_backend, "thread_time", lambda: clock[0])
    crowd = Crowd(GuideLibrary(lambda: tokenizer, VOCAB, 1), tokenizer, helper)
    for row in range(8):
        crowd.add(row, program("regex", "[a-z]{200,}"))
    crowd.step(0)
    helper.submit(int).result()  # which comes behind what is filled ahead
    matcher = guided_rows_of(crowd.guides)[3].matcher
    matcher.inner = SlowMatcher(matcher.inner, clock)
    for _ in range(int(MOST_DEBT / 0.02)):
        crowd.step(0)
    assert not crowd.errors
    for _ in range(4):
        crowd.step(0)
    assert list(crowd.errors) == [3]
    assert "too ambiguous" in crowd.errors[3]
