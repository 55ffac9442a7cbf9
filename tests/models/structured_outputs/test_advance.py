"""A row's guide takes in the drawn tokens, and the state that follows from them."""

import numpy as np
import pytest

from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.guided_row import FilledAhead, GuidedRow
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.params.guide import GuideProgram, GuideSpec

NOTHING = (0, (), False, False)


def row_of(library: GuideLibrary, pattern: str, after: str = "") -> GuidedRow:
    text = program_text(GuideSpec(kind="regex", source=pattern), "llguidance", 64, {})
    row = GuidedRow(library, GuideProgram(backend="llguidance", text=text, after=after))
    row.build([])
    return row


@pytest.fixture
def letters(tokenizer) -> list[int]:
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]


def test_a_row_goes_on_token_by_token_until_its_grammar_is_complete(library, letters):
    a, b, _ = letters
    row = row_of(library, "a[bc]")
    assert row.advance([a], 100) == (1, (), False, True)
    assert row.advance([b], 100) == (1, (), True, False)
    assert row.stopped
    assert row.advance([b], 100) == NOTHING
    assert row.error is None


def test_tokens_behind_the_one_that_completes_the_grammar_do_not_count(library, letters):
    a, b, c = letters
    row = row_of(library, "a[bc]")
    assert row.advance([a, b, c], 100) == (2, (), True, False)
    assert row.stopped


def test_a_token_that_does_not_fit_ends_the_row(library, letters):
    a, b, c = letters
    for tokens in ([c], [a, a, b]):
        row = row_of(library, "a[bc]")
        assert row.advance(tokens, 100) == (len(tokens), (), False, False)
        assert row.error is not None
        assert not row.stopped
        assert row.advance([a], 100) == NOTHING


def test_a_row_wants_no_mask_before_it_wakes(library, tokenizer, letters):
    *before, last = tokenizer.encode("So</think>", add_special_tokens=False)
    row = row_of(library, "ab+", after="</think>")
    for token in before:
        assert row.advance([token], 100) == (1, (), False, False)
    assert row.asleep
    assert row.advance([last], 100) == (1, (), False, True)
    assert row.advance(letters[:2], 100) == (2, (), False, True)


def test_a_mask_that_was_filled_ahead_is_another_one_behind_the_next_token(library, letters):
    row = row_of(library, "a[bc]+")
    row.ahead = FilledAhead(np.zeros((1, library.mask_words), dtype=np.int32), ()), 0
    assert row.advance(letters[:1], 100) == (1, (), False, True)
    assert row.ahead is None
