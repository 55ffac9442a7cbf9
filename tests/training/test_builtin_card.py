"""The card of the built-in model is what the record of its training gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from troupellm.training import record
from troupellm.training.card import CARD, accuracy_table, replaced, stages_table
from troupellm.training.evaluate import NAMES, WEIGHTS

FIRST = record.Stage("from nothing", 60.0, 2, 3e-3, 1500, 6_144_000, {"sums": (3, 4)})
SECOND = record.Stage("further", 12.4, 1, 1e-3, 20, 81_920, {"sums": (4, 4), "small sums": (999, 1000)})


def test_the_shipped_card_says_what_the_record_says() -> None:
    card, stages = CARD.read_text(encoding="utf-8"), record.read(WEIGHTS)
    assert replaced(card, "stages", stages_table(stages)) == card
    assert replaced(card, "accuracy", accuracy_table(stages)) == card


def test_the_shipped_record_tells_of_every_step_and_of_what_it_came_to() -> None:
    stages = record.read(WEIGHTS)
    assert stages[0].text.startswith(record.FROM_NOTHING)
    assert all(stage.tokens == stage.steps * 4096 for stage in stages)
    for stage in stages:
        assert {"sums", "differences", "facts, fresh", "json simple", "tool calls"} <= set(stage.accuracy) <= set(NAMES)
    for task in ("sums", "differences", "facts, combinations", "facts, openers", "facts, phrases"):
        passed, asked = stages[-1].accuracy[task]
        assert asked > 400
        assert passed / asked >= 0.95


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record.write(tmp_path, [FIRST, replace(SECOND, accuracy={})])
    assert record.read(tmp_path) == [FIRST, replace(SECOND, accuracy={})]


def test_every_stage_has_a_row_and_a_column() -> None:
    assert stages_table([FIRST, SECOND]).splitlines()[2:] == [
        "| 1 | from nothing | 60 | 2 | 1,500 | 6.1 million | 0.003 |",
        "| 2 | further | 12 | 1 | 20 | 0.1 million | 0.001 |",
    ]
    assert accuracy_table([FIRST, SECOND]).splitlines() == [
        "| Task | Cases | After stage 1 | After stage 2 |",
        "|---|---|---|---|",
        f"| {NAMES['sums']} | 4 | 75.0 % | 100.0 % |",
        f"| {NAMES['small sums']} | 1000 | – | 99.9 % |",
    ]


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    card = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n<!-- y -->\n<!-- end of y -->\n"
    assert replaced(card, "x", "new\n") == card.replace("old", "new")
    assert replaced(card, "y", "z\n").endswith("<!-- y -->\nz\n<!-- end of y -->\n")
    with pytest.raises(LookupError, match="no part 'z'"):
        replaced(card, "z", "")
