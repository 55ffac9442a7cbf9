"""`bench speculation`: what it concludes, and a small run of it."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests.speculation import flags
from troupellm.load_tests.speculation.arms import Measured, Round
from troupellm.load_tests.speculation.table import Verdict, judgement, line
from troupellm.load_tests.speculation.workloads import agent_turns, copying, held_out, mixed


def answered(seconds: float, tokens: int, *, steps: int, drafts: int = 0, accepted: int = 0, text: int = 1) -> Round:
    return Round(seconds, tokens, steps, drafts, accepted, [[text] * tokens])


def test_ratios_are_medians_over_rounds_and_answers_are_compared() -> None:
    found = Measured(
        "copying", "ngram", 1,
        plain=[answered(1.0, 10, steps=10), answered(2.0, 10, steps=10), answered(1.0, 10, steps=10)],
        drafting=[
            answered(0.5, 10, steps=4, drafts=4, accepted=6),
            answered(0.5, 10, steps=4, drafts=4, accepted=6),
            answered(0.25, 10, steps=4, drafts=2, accepted=3, text=7),
        ],
    )  # fmt: skip
    assert found.ratio == 4.0
    assert found.rates == (10.0, 20.0)
    assert found.acceptance_length == 2.5
    assert found.step_ratio == pytest.approx(0.625)
    assert found.differing == 1
    assert "4.00x" in line("ngram", found, compared=True)
    assert "2 of 3" in line("ngram", found, compared=True)


def test_a_verdict_needs_the_figure_and_the_same_tokens() -> None:
    good, slow, wrong = Verdict("a", 2.1, 2.0, 0), Verdict("b", 1.9, 2.0, 0), Verdict("c", 2.1, 2.0, 3)
    assert [good.kept, slow.kept, wrong.kept] == [True, False, False]
    assert [text.split()[-1] for text in judgement([good, slow, wrong]).splitlines()] == ["kept", "MISSED", "TOKENS"]


def test_workloads_are_as_long_as_asked_and_the_same_every_time() -> None:
    for make in (copying, agent_turns, lambda count: mixed(count, 16)):
        assert len(make(7)) == 7
        assert make(7) == make(7)
    question = copying(1)[0].prompt
    assert isinstance(question, str)
    listed = question.split("Repeat: ")[1].split("<")[0]
    assert question.count(listed) == 3
    assert question.endswith("assistant\n")
    assert set(held_out(2)) >= {"stories", "facts", "JSON", "tool calls", "chat"}


@pytest.mark.slow
def test_a_small_run_says_the_same_with_drafts_and_writes_what_it_found(tmp_path: Path) -> None:
    from troupellm.load_tests.speculation import command

    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    written = tmp_path / "result.json"
    arguments = [
        "--parts", "ngram", "synthetic", "sweep", "--rounds", "1", "--prompts", "2", "--config", "tiny",
        "--precisions", "fp32", "--output-len", "24", "--batches", "2", "--num-threads", "1", "--embedded",
        "--sweep-methods", "ngram", "--result-json", str(written),
    ]  # fmt: skip
    assert command.run(parser.parse_args(arguments)) == 0
    found = json.loads(written.read_text())
    by_part = {each["part"]: each for each in found["measured"]}
    assert by_part["ngram"]["acceptance_length"] > 2.0
    assert by_part["synthetic"]["acceptance_length"] == pytest.approx(3.0, abs=0.8)
    assert {each["differing_answers"] for part, each in by_part.items() if part != "synthetic"} == {0}
    assert len(found["judgement"]) == 3
