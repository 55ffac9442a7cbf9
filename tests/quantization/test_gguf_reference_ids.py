"""Ids of awkward texts: for each `tokenizer.ggml.pre` and each tokenizer model, those of llama.cpp or of the published
patterns, as `tests/reality/make_reference_ids.py` wrote them down."""

from pathlib import Path

import pytest

from troupellm.models.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.tests.support.checkpoints.awkward_texts import TEXTS
from troupellm.tests.support.gguf.gguf_vocabulary import stored, write_vocabulary

STORED = stored()


def test_every_rule_has_reference_ids() -> None:
    assert len(TEXTS) >= 100
    assert {case["settings"].get("pre") for case in STORED["cases"].values()} - {None} == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("name", STORED["cases"])
def test_ids_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    case = STORED["cases"][name]
    path = write_vocabulary(tmp_path / "a.gguf", STORED["vocabularies"][case["vocabulary"]], **case["settings"])
    tokenizer = Tokenizer.load(path)
    compared = 0
    for text, known, row in zip(TEXTS, STORED["ids"], STORED["rows"][name], strict=True):
        if row is not None:
            assert tokenizer.encode(text, add_special_tokens=False) == known[row], text
            compared += 1
    assert compared >= 130
