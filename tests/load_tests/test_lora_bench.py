"""`bench lora` on a tiny model."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests import cli


def test_steps_loads_and_memory_are_measured_beside_those_without_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, result = argparse.ArgumentParser(), tmp_path / "result.json"
    cli.command(parser.add_subparsers())
    sizes = ["--model", "tiny", "--batches", "8", "32", "--adapters", "2", "--rank", "4", "--context", "8"]
    lengths = ["--steps", "3", "--rounds", "1", "--streams", "2", "--loads", "3", "--memory-loads", "4"]
    args = parser.parse_args(["bench", "lora", *sizes, *lengths, "--num-threads", "1", "--result-json", str(result)])
    assert args.func(args) in (0, 1)  # a bar is for a quiet machine
    found = json.loads(result.read_text())
    sides = ["the model alone", "empty slots", "one adapter", "one adapter, merged", "all adapters"]
    assert [list(steps["seconds"]) for steps in found["steps"]] == [sides] * 2
    assert all(seconds > 0 for steps in found["steps"] for (seconds,) in steps["seconds"].values())
    assert (found["gaps"]["loads"], found["memory"]["loads"]) == (3, 4)
    assert found["memory"]["expected"] > found["memory"]["before"] > 0
    assert [verdict["wanted"] for verdict in found["verdicts"]] == [
        ">= 0.98",
        ">= 0.98",
        ">= 0.9",
        ">= 0.95",
        "<= 1.5",
        "<= 1.02",
    ]
    assert "all adapters" in capsys.readouterr().out
