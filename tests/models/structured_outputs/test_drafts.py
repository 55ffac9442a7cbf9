"""Guides follow drafts and come back: an error behind drafts that may be refused ends no request."""

from collections.abc import Callable

import numpy as np
import pytest

from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.llguidance_backend import LLGuidance
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.engines.inside import guided_rows_of
from troupellm.tests.support.guides.guide_crowd import VOCAB

PROGRAM = program_text(GuideSpec(kind="regex", source="[ab]{1,60}"), "llguidance", 64, {})


@pytest.fixture
def guided(tokenizer, helper) -> GuidedRows:
    rows = GuidedRows(GuideLibrary(lambda: tokenizer, VOCAB, 1), helper)
    guide = GuideProgram(backend="llguidance", text=PROGRAM, field="structured_outputs.regex")
    rows.add(0, SamplingState(guide=guide), [])
    guided_rows_of(rows)[0].wait()
    return rows


def forbidden(rows: GuidedRows, drafts: RowDrafts) -> np.ndarray:
    """[1 + drafts, vocab]"""
    filled = rows.begin([0] * (1 + len(drafts)), {0: drafts})
    assert filled is not None
    return np.unpackbits(~rows.filled(filled).bits.numpy().view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]


@pytest.mark.parametrize("parents", [None, [-1, -1, 0, 1]])
@pytest.mark.parametrize("broken", ["fill", "accept"])
def test_a_grammar_that_fails_behind_drafts_goes_on(
    guided: GuidedRows, tokenizer, monkeypatch: pytest.MonkeyPatch, parents: list[int] | None, broken: str
) -> None:
    a, b, c = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
    drafts = RowDrafts([a, b, b, a], parents)
    fine = forbidden(guided, drafts)
    assert not fine.all(axis=1).any()
    fill, fits, calls = LLGuidance.fill, type(guided_rows_of(guided)[0].matcher).fits, [0]

    def breaking(call: Callable, matcher) -> None:
        calls[0] += 1
        if calls[0] == 2:
            matcher.accept([c])
            assert matcher.error is not None

    def filling(self, matchers, masks):
        breaking(fill, matchers[0])
        return fill(self, matchers, masks)

    def fitting(self, token_id):
        breaking(fits, self)
        return fits(self, token_id)

    if broken == "fill":
        monkeypatch.setattr(LLGuidance, "fill", filling)
    else:
        monkeypatch.setattr(type(guided_rows_of(guided)[0].matcher), "fits", fitting)
    hurt = forbidden(guided, drafts)
    assert calls[0] > 1
    assert hurt.all(axis=1).any(), "nothing may follow where it failed"
    assert (hurt[0] == fine[0]).all()
    monkeypatch.undo()
    assert guided_rows_of(guided)[0].error is None
    assert (forbidden(guided, drafts) == fine).all()


def test_masks_that_are_slow_behind_drafts_end_the_drafts(
    guided: GuidedRows, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    fill, calls = LLGuidance.fill, [0]

    def slow(self, matchers, masks):
        fill(self, matchers, masks)
        calls[0] += 1
        return [0.0 if calls[0] == 1 else 1.0] * len(matchers)

    monkeypatch.setattr(LLGuidance, "fill", slow)
    drafts = RowDrafts([a, a])
    guided.trim(0, drafts)
    assert len(drafts) == 2
    forbidden(guided, drafts)
    assert guided_rows_of(guided)[0].error is None
    guided.trim(0, drafts)
    assert not len(drafts)
