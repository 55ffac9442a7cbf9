"""Row F7 of the fault table: files that change, vanish or cannot be read any more while a model is read from them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from troupellm.models.checkpoint import safetensors as reading
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.hub.weight_files import INDEX, SINGLE
from troupellm.tests.support.checkpoints.refusals import config, engine_of, refused
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

pytestmark = pytest.mark.anyio

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def later(file: Path) -> None:
    """The clock of a file system may be coarse."""
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))


def replace_weights(folder: Path) -> None:
    """By those of another model of the same shape."""
    other = write_tiny_model(folder.parent / "other", seed=1)
    os.replace(other / SINGLE, folder / SINGLE)
    later(folder / SINGLE)


def change_settings(folder: Path) -> None:
    config(rope_theta=5000.0)(folder)
    later(folder / "config.json")


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "replaced": (SINGLE, replace_weights, "has changed"),
    "touched": (SINGLE, lambda folder: later(folder / SINGLE), "has changed"),
    "cut": (SINGLE, lambda folder: os.truncate(folder / SINGLE, 1000), r"has changed from [0-9,]+ to 1,000 bytes"),
    "gone": (SINGLE, lambda folder: (folder / SINGLE).unlink(), "has gone"),
    "other settings": ("config.json", change_settings, r"has changed from \d+ to \d+ bytes"),
    "no settings": ("config.json", lambda folder: (folder / "config.json").unlink(), "has gone"),
}


def harm_before(monkeypatch: pytest.MonkeyPatch, method: str, call: int, harm: Callable[[], object]) -> list[int]:
    """A reader that does harm right before its n-th call of a method; the list is empty once it has."""
    original, left = getattr(Checkpoint, method), [call]

    def harmful(*given: Any) -> Any:
        if left:
            left[0] -= 1
            if not left[0]:
                left.clear()
                harm()
        return original(*given)

    monkeypatch.setattr(Checkpoint, method, harmful)
    return left


@pytest.mark.parametrize(("method", "call"), [("_read", 1), ("_read", 4), ("finish", 1)])
@pytest.mark.parametrize(("name", "harm", "what"), CHANGES.values(), ids=CHANGES.keys())
async def test_F7_files_that_change_while_the_model_is_read(folder, monkeypatch, name, harm, what, method, call):
    left = harm_before(monkeypatch, method, call, lambda: harm(folder))
    message = await refused(folder)
    assert not left
    assert re.fullmatch(f"{re.escape(name)} {what} while the model was read from it", message)


async def test_F7_the_model_is_served_once_its_files_are_whole(folder, monkeypatch):
    async with engine_of(folder) as engine:
        solo = await engine.generate("Once", max_tokens=8, temperature=0.0, ignore_eos=True)
    harm_before(monkeypatch, "_read", 4, lambda: os.truncate(folder / SINGLE, 1000))
    assert (await refused(folder)).startswith(SINGLE)
    write_tiny_model(folder)
    async with engine_of(folder) as engine:
        again = await engine.generate("Once", max_tokens=8, temperature=0.0, ignore_eos=True)
    assert again.token_ids == solo.token_ids


ERRORS = {
    # The first as Python raises it, the second as the library does.
    "no permission": (PermissionError(13, "Permission denied", "/secret/model"), "Permission denied"),
    "vanished": (FileNotFoundError("No such file or directory: /secret/model"), "No such file or directory"),
    "a bad disk": (OSError(5, "Input/output error"), "Input/output error"),
}


class BadDisk:
    """An opened file whose tensors cannot be read."""

    def __init__(self, handle: Any, error: OSError) -> None:
        self._handle = handle
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def get_tensor(self, name: str) -> Any:
        raise self._error


@pytest.mark.parametrize(("error", "why"), ERRORS.values(), ids=ERRORS.keys())
async def test_F7_weights_that_cannot_be_read_any_more(folder, monkeypatch, error, why):
    def refuse(path: Path, framework: str) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(reading, "safe_open", refuse)
        assert await refused(folder) == f"{SINGLE} cannot be read: {why}"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "safe_open", lambda path, framework: BadDisk(safe_open(path, framework), error))
        message = await refused(folder)
        assert message.startswith(f"{SINGLE}: tensor ")
        assert message.endswith(f" cannot be read: {why}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
async def test_F7_settings_that_may_not_be_read_any_more(folder, monkeypatch, name):
    read = Path.read_bytes

    def read_unless(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_unless)
    message = await refused(folder)
    assert message.startswith(name)
    assert message.endswith("Permission denied")


def split(folder: Path) -> dict[str, str]:
    """Two shards and their index instead of one file; the file of each tensor."""
    tensors = load_file(folder / SINGLE)
    homes = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        part = {name: tensors[name] for name, home in homes.items() if home == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))
    return homes


def swap(folder: Path, homes: dict[str, str]) -> str:
    """Each of these says how the refusal begins."""
    os.rename(folder / SHARDS[0], folder / "spare")
    os.rename(folder / SHARDS[1], folder / SHARDS[0])
    os.rename(folder / "spare", folder / SHARDS[1])
    return f"{INDEX}: tensor "


def drop_a_tensor(folder: Path, homes: dict[str, str]) -> str:
    tensors = load_file(folder / SHARDS[1])
    del tensors[max(tensors)]
    save_file(tensors, folder / SHARDS[1], metadata={"format": "pt"})
    return f"{INDEX}: tensor {max(homes, key=lambda name: (homes[name], name))} is not in {SHARDS[1]}, nor in another"


def forget_a_tensor(folder: Path, homes: dict[str, str]) -> str:
    """Neither has it."""
    name = max(load_file(folder / SHARDS[1]))
    drop_a_tensor(folder, homes)
    (folder / INDEX).write_text(json.dumps({"weight_map": {key: home for key, home in homes.items() if key != name}}))
    return f"{SHARDS[0]} and {SHARDS[1]}: tensor {name} is missing"


def leave_a_shard_out(folder: Path, homes: dict[str, str]) -> str:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(homes, SHARDS[0])}))
    return f"{SHARDS[1]} is left over: {INDEX} does not name it"


def move_a_tensor(folder: Path, homes: dict[str, str]) -> str:
    name = min(homes)
    (folder / INDEX).write_text(json.dumps({"weight_map": homes | {name: SHARDS[1]}}))
    return f"{INDEX}: tensor {name} is in {SHARDS[0]}, not in {SHARDS[1]}"


MISMATCHES = (swap, drop_a_tensor, forget_a_tensor, leave_a_shard_out, move_a_tensor)


@pytest.mark.parametrize("mismatch", MISMATCHES)
async def test_F7_shards_that_are_not_those_of_the_index(folder, mismatch):
    homes = split(folder)
    async with engine_of(folder) as engine:
        assert len((await engine.generate("Once", max_tokens=2, ignore_eos=True)).token_ids) == 2
    wanted = mismatch(folder, homes)
    assert (await refused(folder)).startswith(wanted)
