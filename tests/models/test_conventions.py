"""The conventions table: every habit of published checkpoints gives the tokens of transformers, or a refusal by name.

Each row runs with two families. One of them is quick; the other one runs in `make test-all`.
"""

import re
from pathlib import Path

import pytest
from convention_refusals import REFUSED
from convention_rows import LOADS
from quantized_llama import check_tokens, load, tokens_of
from tiny_checkpoints import FAMILIES, Files

from troupellm.protocol.errors import ModelLoadError

NEW_TOKENS = 4


def both_families(rows: object) -> list[object]:
    """Every row with every family; the families take turns to be the quick one."""
    return [
        pytest.param(family, name, marks=[] if (number + place) % len(FAMILIES) == 0 else pytest.mark.slow)
        for number, name in enumerate(rows)  # type: ignore[call-overload]
        for place, family in enumerate(FAMILIES)
    ]


@pytest.mark.parametrize(("family", "row"), both_families(LOADS))
def test_a_checkpoint_with_this_habit_gives_the_tokens_of_transformers(tmp_path: Path, family: str, row: str) -> None:
    change, note, tied = LOADS[row]
    files = Files(family, tied=tied)
    change(files)
    worker, seen = load(files.write(tmp_path))
    check_tokens(files.model, tokens_of(worker, NEW_TOKENS))
    worker.close()
    details = [progress.detail for progress in seen if progress.detail]
    if note:
        assert [detail for detail in details if re.search(note, detail)], details


@pytest.mark.parametrize(("family", "row"), both_families(REFUSED))
def test_a_checkpoint_that_cannot_be_served_is_refused_by_name(tmp_path: Path, family: str, row: str) -> None:
    change, message, hint = REFUSED[row]
    files = Files(family)
    after = change(files)
    files.write(tmp_path)
    if after is not None:
        after(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert re.search(message, caught.value.message), caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert re.search(hint, caught.value.hint or ""), caught.value.hint
