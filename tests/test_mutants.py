"""The table of planted faults fits the product; `make mutants` tries whether tests notice them."""

from pathlib import Path

import pytest

from troupellm.tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[1]


def test_each_planted_text_occurs_once_and_is_python_after_the_change() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.right) == 1, f"{mutant.file}: {mutant.fault}"
        assert mutant.wrong not in (mutant.right, text)
        compile(text.replace(mutant.right, mutant.wrong), mutant.file, "exec")


def test_each_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.tests.split(), mutant.fault
        assert all((ROOT / "tests" / name).is_file() for name in mutant.tests.split()), mutant.fault


@pytest.mark.parametrize("room", ["protocol", "kernels", "models", "actors", "server"])
def test_every_room_has_planted_faults(room: str) -> None:
    assert sum(mutant.file.startswith(f"{room}/") for mutant in MUTANTS) >= 10
