"""`bench speculation`: what it concludes, and a small run of it."""

import argparse
import json
import re
from pathlib import Path

import anyio
import pytest

from troupellm.load_tests.flags import engine
from troupellm.load_tests.speculation import words
from troupellm.load_tests.speculation.agent import agent_turns
from troupellm.load_tests.speculation.arms import Arms, Measured, Round
from troupellm.load_tests.speculation.table import Verdict, judgement, line
from troupellm.load_tests.speculation.workloads import copying, held_out, mixed


def answered(seconds: float, tokens: int, *, steps: int, drafts: int = 0, accepted: int = 0, text: int = 1) -> Round:
    return Round(seconds, tokens, steps, drafts, accepted, [[text] * tokens])


def test_ratios_are_medians_over_rounds_and_answers_are_compared() -> None:
    found = Measured(
        "copying",
        "ngram",
        1,
        plain=[answered(1.0, 10, steps=10), answered(2.0, 10, steps=10), answered(1.0, 10, steps=10)],
        drafting=[
            answered(0.5, 10, steps=4, drafts=4, accepted=6),
            answered(0.5, 10, steps=4, drafts=4, accepted=6),
            answered(0.25, 10, steps=4, drafts=2, accepted=3, text=7),
        ],
    )
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
    for make in (copying, lambda count: agent_turns(count, 3), lambda count: mixed(count, 16)):
        assert len(make(7)) == 7
        assert make(7) == make(7)
    question = copying(1)[0].prompt
    assert isinstance(question, str)
    listed = question.split("Repeat: ")[1].split("<")[0]
    assert question.count(listed) == 3
    assert question.endswith("assistant\n")
    assert set(held_out(2)) >= {"stories", "facts", "JSON", "tool calls", "chat"}


def test_an_agents_rounds_are_alike_but_for_their_values() -> None:
    values = re.compile("|".join(words.NAMES + words.CITIES) + r"|\w+\.txt|\d+")
    first, second, other_seed = (
        [str(question.prompt) for question in questions]
        for questions in (agent_turns(12, 1), agent_turns(12, 2), agent_turns(12, 1, seed=8))
    )
    for one, two, three in zip(first, second, other_seed, strict=True):
        assert len({one, two, three}) == 3
        assert len({values.sub("?", text) for text in (one, two, three)}) == 1
    assert len({values.sub("?", text) for text in first}) == 5, "three tools and two records"
    assert sum("Call " in text for text in first) == sum("Extract: " in text for text in first) == 6


@pytest.mark.slow
def test_suffix_drafts_most_tokens_of_turns_with_other_values() -> None:
    """By count, not by time: what `suffix` makes of turns whose form alone was seen before."""

    async def ask() -> list[float]:
        settings = {"method": "suffix", "num_speculative_tokens": 12, "adaptive": False}
        lengths = []
        async with Arms(None, settings, batch=1, longest=1024, threads=1, embedded=True) as arms:
            for questions in (lambda number: agent_turns(6, number), agent_turns(6, 9)):
                found = await arms.measure("agent turns", questions, rounds=2)
                assert found.differing == 0
                lengths.append(found.acceptance_length)
        return lengths

    other_values, same_turns = anyio.run(ask)
    assert same_turns > other_values > 2.0


@pytest.mark.slow
def test_a_small_run_says_the_same_with_drafts_and_writes_what_it_found(tmp_path: Path) -> None:
    from troupellm.load_tests.bench import speculation as command

    parser = argparse.ArgumentParser()
    engine.speculation(parser)
    written = tmp_path / "result.json"
    arguments = [
        "--parts",
        "ngram",
        "suffix",
        "synthetic",
        "sweep",
        "--rounds",
        "1",
        "--prompts",
        "2",
        "--config",
        "tiny",
        "--precisions",
        "fp32",
        "--output-len",
        "96",
        "--batches",
        "2",
        "--num-threads",
        "1",
        "--embedded",
        "--sweep-methods",
        "ngram",
        "--result-json",
        str(written),
    ]
    assert command.run(parser.parse_args(arguments)) == 0
    found = json.loads(written.read_text())
    by_part = {each["part"]: each for each in found["measured"]}
    assert [each["workload"] for each in found["measured"] if each["part"] == "suffix"][-1] == "agent, all drafts"
    assert by_part["ngram"]["acceptance_length"] > 2.0
    assert by_part["suffix"]["acceptance_length"] > 1.5
    assert by_part["synthetic"]["acceptance_length"] == pytest.approx(3.0, abs=1.0)
    assert {each["differing_answers"] for part, each in by_part.items() if part != "synthetic"} == {0}
    assert len(found["judgement"]) == 5
