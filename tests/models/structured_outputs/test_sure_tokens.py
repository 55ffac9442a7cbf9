"""Where only one token may come next, no mask is computed, and the draw is the same as with a mask."""

import json

import numpy as np
import pytest

from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.guided_row import GuidedRow
from troupellm.models.structured_outputs.llguidance_backend import LLGuidance
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.guides.guide_crowd import VOCAB, Crowd

SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 6,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["red", "green", "blue"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
GRAMMARS = {
    "json_schema": json.dumps(SCHEMA),
    "choice": json.dumps(["a very long choice indeed", "a short one", "another very long choice"]),
    "regex": "(north|south)-[0-9]{2}-(east|west)",
    "grammar": 'start: ("north" | "south") "-side-" /[0-9]{2}/ " of the town"',
}


def program(kind: str) -> GuideProgram:
    text = program_text(GuideSpec(kind=kind, source=GRAMMARS[kind]), "llguidance", 64, {})
    return GuideProgram(backend="llguidance", text=text, field=f"structured_outputs.{kind}")


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_mask_allows_the_first_forced_token_alone(library: GuideLibrary, kind: str) -> None:
    generator, seen = np.random.default_rng(0), 0
    for _ in range(6):
        matcher = library.matcher(program(kind))
        for _ in range(60):
            forced = matcher.forced()
            masks = np.zeros((1, library.mask_words), dtype=np.int32)
            library.backend("llguidance").fill([matcher], masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            if forced:
                seen += 1
                assert allowed.tolist() == forced[:1]
            assert matcher.accept([int(generator.choice(allowed[allowed < VOCAB]))])
            if matcher.stopped:
                break
    assert seen


def crowd_of(library: GuideLibrary, tokenizer, helper) -> Crowd:
    crowd = Crowd(library, tokenizer, helper)
    for row in range(16):
        crowd.add(row, program(list(GRAMMARS)[row % len(GRAMMARS)]))
    crowd.add(16, program("regex"), allowed_token_ids=(1,))
    crowd.run(400)
    return crowd


def test_a_token_that_must_come_needs_no_mask(library, tokenizer, helper, monkeypatch) -> None:
    fill, filled = LLGuidance.fill, [0]

    def counted(self, matchers, masks):
        filled[0] += len(matchers)
        return fill(self, matchers, masks)

    monkeypatch.setattr(LLGuidance, "fill", counted)
    crowd = crowd_of(library, tokenizer, helper)
    saved, filled[0] = filled[0], 0
    with monkeypatch.context() as patched:
        patched.setattr(GuidedRow, "only", property(lambda row: None, lambda row, token: None))
        every = crowd_of(library, tokenizer, helper)
    assert crowd.finished == every.finished
    assert len(crowd.finished) == 16
    assert crowd.errors == every.errors
    assert list(crowd.errors) == [16]
    assert 0 < saved < filled[0]


def test_what_is_known_is_forgotten_when_tokens_are_taken_back(library, tokenizer) -> None:
    row = GuidedRow(library, program("choice"), jumps=True)
    row.build([])
    *before, last = tokenizer.encode("another", add_special_tokens=False)
    row.accept(before)
    assert row.advance([last], 1) == (1, [], False, False), "one alone saves no step"
    sure = row.only
    assert sure is not None
    assert row.follow(sure)
    assert row.only is None
    row.return_to(1)
    assert row.only is None
    row.rollback(1)
    assert row.advance([last], 1) == (1, [], False, False)
    assert row.only == sure
    row.rollback(1)
    taken, following, complete, wants_mask = row.advance([last], 99)
    assert following[0] == sure
    assert (taken, complete, wants_mask) == (1, True, False)
    assert row.stopped
    row.rollback(1)
    assert not row.stopped
