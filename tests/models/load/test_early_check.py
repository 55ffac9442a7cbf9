"""Headers and config.json rule a model out before torch is imported, which takes seconds, and kernels are compiled."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

LOADED = """
import sys, troupellm
try:
    troupellm.LLM(sys.argv[1])
except troupellm.ModelLoadError as error:
    print(error.message)
print("torch" in sys.modules)
"""
CHECKED = """
import sys
from pathlib import Path
from troupellm.models.load.early_check import check_stored
from troupellm.protocol.config.engine import ModelConfig
check_stored(Path(sys.argv[1]), ModelConfig())
print("torch" in sys.modules)
"""


def said(program: str, folder: Path) -> list[str]:
    """The lines that a fresh process writes."""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10_000)


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def with_a_wrong_value(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "model.safetensors is cut: it has 10,000 of 146,128 bytes"),
        (without_a_shard, "model-00002-of-00002.safetensors is missing, one of 2 shards"),
        (with_a_wrong_value, 'config.json: hidden_size must be an integer of at least 1, got "64"'),
    ],
)
def test_a_model_that_its_files_rule_out_is_refused_without_torch(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    change(write_tiny_model(tmp_path / "model"))
    assert said(LOADED, tmp_path / "model") == [message, "False"]


@pytest.mark.parametrize("told", [{"model_type": "my_own"}, {"architectures": ["MyOwnModel", "MyOwnForCausalLM"]}])
def test_names_that_only_transformers_may_know_are_left_to_the_loader(tmp_path: Path, told: dict[str, object]) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config | told))
    assert said(CHECKED, folder) == ["False"]
