"""Masks are filled as soon as tokens are drawn, before it is known which rows the next step has."""

import numpy as np
import pytest

from troupellm.models.structured_outputs import guided_rows as rows_module
from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.fill_masks import fill_ahead
from troupellm.models.structured_outputs.guided_rows import KEPT_AHEAD, LEAST_AHEAD, GuidedRows
from troupellm.models.structured_outputs.llguidance_backend import LLGuidance
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.engines.inside import guided_rows_of

PROGRAM = GuideProgram(
    backend="llguidance",
    text=program_text(GuideSpec(kind="regex", source="[ab][cd][ef][gh]{1,40}"), "llguidance", 64, {}),
)


def begun(library, helper, count: int, **options: bool) -> GuidedRows:
    rows = GuidedRows(library, helper, **options)
    for row in range(count):
        rows.add(row, SamplingState(guide=PROGRAM), [])
    rows.filled(rows.begin(list(range(count))))
    return rows


def advance(rows: GuidedRows, numbers, token: int) -> None:
    rows.advance(numbers, [[token]] * len(numbers), [100] * len(numbers))


def mask_behind(library: GuideLibrary, tokens) -> np.ndarray:
    matcher, masks = library.matcher(PROGRAM), np.zeros((1, library.mask_words), dtype=np.int32)
    assert matcher.accept(tokens)
    library.backend("llguidance").fill([matcher], masks)
    return masks[0]


@pytest.fixture
def letters(tokenizer) -> list[int]:
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ace"]


def test_a_step_of_any_of_the_rows_finds_their_masks(library, helper, letters, monkeypatch):
    a, count = letters[0], LEAST_AHEAD + 3
    rows, expected = begun(library, helper, count), mask_behind(library, [a])
    advance(rows, list(range(count)), a)
    helper.submit(int).result()  # which comes behind what is filled ahead
    monkeypatch.setattr(LLGuidance, "fill", lambda *_: pytest.fail("the masks are there"))
    for numbers in ([6, 1, 3], list(range(count)), [2]):
        bits = rows.filled(rows.begin(numbers)).bits.numpy()
        assert (bits == expected).all()
        assert len(bits) == len(numbers)


def test_a_row_that_goes_on_has_another_mask(library, helper, letters):
    a, c, e = letters
    count = LEAST_AHEAD + 1
    rows = begun(library, helper, count)
    advance(rows, list(range(count)), a)
    advance(rows, [0, 1], c)
    advance(rows, [1], e)
    bits = rows.filled(rows.begin([2, 1, 0])).bits.numpy()
    for mask, tokens in zip(bits, ([a], [a, c, e], [a, c]), strict=True):
        assert (mask == mask_behind(library, tokens)).all()
    assert len({mask.tobytes() for mask in bits}) == 3


def test_a_step_finds_masks_that_were_filled_at_different_times(library, helper, letters, monkeypatch):
    a, c, _ = letters
    count = 2 * LEAST_AHEAD
    rows = begun(library, helper, count)
    advance(rows, list(range(count)), a)
    advance(rows, list(range(LEAST_AHEAD)), c)
    helper.submit(int).result()
    early, late = mask_behind(library, [a]), mask_behind(library, [a, c])
    monkeypatch.setattr(LLGuidance, "fill", lambda *_: pytest.fail("the masks are there"))
    numbers = [count - 1, 0, LEAST_AHEAD, 1, 2]
    bits = rows.filled(rows.begin(numbers)).bits.numpy()
    for mask, number in zip(bits, numbers, strict=True):
        assert (mask == (late if number < LEAST_AHEAD else early)).all()
    assert (early != late).any()


def test_a_row_that_waits_long_for_its_step_keeps_no_masks_of_others(library, helper, tokenizer, letters):
    a, c, e = letters
    (g,) = tokenizer.encode("g", add_special_tokens=False)[:1]
    others = list(range(1, LEAST_AHEAD + 1))
    rows = begun(library, helper, len(others) + 1)
    advance(rows, [0, *others], a)
    for token in (c, e, *[g] * (KEPT_AHEAD - 2)):
        advance(rows, others, token)
        assert guided_rows_of(rows)[0].ahead is not None
    advance(rows, others, g)
    assert guided_rows_of(rows)[0].ahead is None
    bits = rows.filled(rows.begin([0])).bits.numpy()
    assert (bits[0] == mask_behind(library, [a])).all()


def test_a_handful_of_rows_waits_for_its_step(library, helper, letters):
    rows = begun(library, helper, LEAST_AHEAD - 1)
    advance(rows, list(range(LEAST_AHEAD - 1)), letters[0])
    helper.submit(int).result()
    assert all(row.ahead is None for row in guided_rows_of(rows).values())


def test_a_row_that_cannot_go_on_says_so_when_its_step_comes(library, helper, letters, monkeypatch):
    """A mask that fails ahead of its step ends its own row alone."""
    a, count = letters[0], LEAST_AHEAD
    rows, fill = begun(library, helper, count), LLGuidance.fill

    def breaking(self, matchers, masks):
        matchers[2].accept([a])  # which does not fit
        return fill(self, matchers, masks)

    monkeypatch.setattr(LLGuidance, "fill", breaking)
    advance(rows, list(range(count)), a)
    helper.submit(int).result()
    monkeypatch.undo()
    bits = rows.filled(rows.begin(list(range(count)))).bits.numpy()
    assert [bool(mask.any()) for mask in bits] == [True, True, False, True, True]
    assert guided_rows_of(rows)[2].error is not None


def test_masks_that_no_row_wants_any_more_are_let_go(library, helper, letters, monkeypatch):
    made = []

    def noted(*arguments):
        made.extend(fill_ahead(*arguments))
        return made

    monkeypatch.setattr(rows_module, "fill_ahead", noted)
    count = LEAST_AHEAD + 1
    rows = begun(library, helper, count)
    advance(rows, list(range(count)), letters[0])
    helper.submit(int).result()
    assert [filled() is None for filled in made] == [False]
    for row in range(count):
        rows.drop(row)
    assert [filled() is None for filled in made] == [True]


def test_where_no_core_is_left_masks_are_filled_when_their_step_comes_and_on_the_spot(
    library, helper, letters, monkeypatch
):
    monkeypatch.setattr(rows_module, "fill_ahead", lambda *_: pytest.fail("it would hold up the step"))
    count = LEAST_AHEAD + 3
    rows = begun(library, helper, count, crowded=True)
    advance(rows, list(range(count)), letters[0])
    monkeypatch.setattr(rows_module, "CROWDED_SECONDS", 60.0)
    monkeypatch.setattr(helper, "submit", lambda *_: pytest.fail("another thread is not quicker"))
    bits = rows.filled(rows.begin(list(range(count)))).bits.numpy()
    assert (bits == mask_behind(library, [letters[0]])).all()
