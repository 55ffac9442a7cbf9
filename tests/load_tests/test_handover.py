"""The worked example: prefill on one engine, decode on another one, the same tokens as alone."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench import handover as command
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

PROMPT, BLOCK = 200, 16


@pytest.mark.parametrize("connector", ["tcp-peer", "shared-directory"])
def test_only_the_last_block_is_computed_again(
    connector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        model=str(write_tiny_model(tmp_path / "tiny")),
        connector=connector,
        prompt_tokens=PROMPT,
        max_tokens=16,
        prompts=2,
        num_threads=1,
        result_json=str(tmp_path / "result.json"),
    )
    assert command.run(args) == 0
    results = json.loads((tmp_path / "result.json").read_text())
    assert [each["identical"] for each in results] == [True, True]
    assert [each["handed_over"] for each in results] == [PROMPT // BLOCK * BLOCK] * 2
    assert connector in capsys.readouterr().out
