"""Rows F1 to F7 of the fault table through the command: its exit code, and one line that says why."""

import json
import os
import pickle
from pathlib import Path

import anyio
import pytest
from safetensors.numpy import load_file, save_file

from troupellm.server.base.exit_codes import EXIT_MODEL
from troupellm.tests.support.checkpoints.refusals import Change, config, content
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.processes import serving_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"


def half(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def pickle_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({HEAD: 1}))


def pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def without_head(folder: Path) -> None:
    """Files as a reader would find them if half of a model had been replaced."""
    weights = load_file(folder / WEIGHTS)
    del weights[HEAD]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def index(file: str) -> Change:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: file}}))


CASES: dict[str, tuple[Change, str]] = {
    # what is changed, and what the line names
    "F1 no header": (content(b"\xff" * 40, WEIGHTS), WEIGHTS),
    "F1 half of the file": (half, WEIGHTS),
    "F2 a pickle alone": (pickle_alone, "pytorch_model.bin"),
    "F3 no JSON": (content(b"{"), "config.json"),
    "F3 an unknown model": (config(architectures=["NobodyForCausalLM"], model_type="nobody"), "config.json"),
    "F4 no tokenizer": (content(b"{", "tokenizer.json"), "tokenizer.json"),
    "F5 a template that does not parse": (config("tokenizer_config.json", chat_template="{% for %}"), "chat template"),
    "F6 a file above the folder": (index("../tiny/model.safetensors"), INDEX),
    "F6 a pipe": (pipe, WEIGHTS),
    "F7 a tensor that is gone": (without_head, HEAD),
}
WAYS = [(name, ()) for name in CASES]
WAYS += [("F1 half of the file", ("--no-worker-process",)), ("F3 no JSON", ("--api-server-count", "2"))]


@pytest.mark.parametrize(("name", "flags"), WAYS, ids=[" ".join((name, *flags)) for name, flags in WAYS])
async def test_a_server_process_that_cannot_load_says_why_in_one_line_and_ends(tmp_path, name, flags):
    folder = write_tiny_model(tmp_path / "tiny")
    change, named = CASES[name]
    change(folder)
    async with serving_process(folder, *flags) as server:
        assert await server.exit_code(60) == EXIT_MODEL
        await anyio.wait_all_tasks_blocked()
    told = [line for line in server.log if line.startswith("troupellm: ")]
    assert len(told) == 1
    assert named in told[0]
    assert str(folder) not in told[0]
    assert not server.logged("Traceback")
    assert not server.logged("ready: ")
