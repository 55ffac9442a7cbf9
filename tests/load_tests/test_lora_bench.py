"""`bench lora` on a tiny model."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests import cli


def test_steps_with_adapters_are_timed_beside_steps_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, result = argparse.ArgumentParser(), tmp_path / "result.json"
    cli.command(parser.add_subparsers())
    argv = ["--model", "tiny", "--batches", "3", "--adapters", "2", "--rank", "4", "--context", "8", "--steps", "3"]
    args = parser.parse_args(["bench", "lora", *argv, "--rounds", "1", "--result-json", str(result)])
    assert args.func(args) == 0
    cells = json.loads(result.read_text())
    assert [cell["side"] for cell in cells] == ["the model alone", "with empty slots", "one adapter", "all adapters"]
    assert cells[0]["ratio"] == 1.0
    assert all(cell["tokens_per_second"] > 0 for cell in cells)
    assert "all adapters" in capsys.readouterr().out
