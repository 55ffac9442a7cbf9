"""Scripts of vLLM's users run with nothing but the name of the package changed, each in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parent / "clients" / "vllm_scripts.py"


def said(folder: Path, name: str, *flags: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS), name, "--model", str(BUILTIN_FOLDER), *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_prompts_and_conversations_with_flags(tmp_path: Path) -> None:
    found = said(tmp_path, "basic", "--max-tokens", "8", "--temperature", "0", "--max_model_len", "512")
    assert found["prompts"] == ["Hello, my name is", "The capital of France is", "Once upon a time"]
    assert all(0 < number <= 8 for number in found["tokens"])
    assert set(found["reasons"]) <= {"stop", "length"}
    assert found["same"]


def test_prompts_that_the_script_tokenizes(tmp_path: Path) -> None:
    assert said(tmp_path, "tokenizer") == {"same": True, "decoded": True, "ids": True}


def test_structured_outputs_logprobs_and_beams(tmp_path: Path) -> None:
    found = said(tmp_path, "structured")
    assert found["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{1,8}@[a-z]{1,8}\.com", found["regex"])
    assert isinstance(json.loads(found["schema"])["n"], int)
    assert len(found["logprobs"]) == 2
    assert min(found["logprobs"]) >= 2
    assert found["first"]
    assert found["beams"] == 3


def test_an_engine_that_is_driven_step_by_step(tmp_path: Path) -> None:
    assert said(tmp_path, "steps", "--max-model-len", "512") == {"0": 1, "1": 2, "2": 3}


def test_answers_that_are_iterated_over(tmp_path: Path) -> None:
    assert said(tmp_path, "streamed") == {"tokens": 12, "ended": True}
