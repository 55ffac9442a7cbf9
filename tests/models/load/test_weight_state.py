"""A file of weights that was changed in any way is told from the one that was read."""

import os
import shutil
from pathlib import Path

import pytest

from troupellm.models.load.weight_state import END_BYTES, require_same, weight_state
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import WeightsChanged
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def flip_first_byte(file: Path) -> None:
    flip(file, 0)


def flip_last_byte(file: Path) -> None:
    flip(file, -1)


def overwrite(file: Path) -> None:
    file.write_bytes(file.read_bytes()[::-1])


@pytest.mark.parametrize("change", [flip_first_byte, flip_last_byte, overwrite])
def test_other_content_counts_though_size_and_time_are_the_same(folder: Path, change: object) -> None:
    first, stat = weight_state(folder, ModelConfig()), (folder / WEIGHTS).stat()
    assert stat.st_size > 2 * END_BYTES
    assert callable(change)
    change(folder / WEIGHTS)
    os.utime(folder / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(WeightsChanged, match=f"{WEIGHTS} has changed since the weights that are served were read"):
        require_same(first, weight_state(folder, ModelConfig()))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (WEIGHTS, lambda file: os.utime(file, ns=(1, 1)), "has changed"),
        ("config.json", lambda file: file.write_text(file.read_text() + " "), "has changed"),
        ("quantize_config.json", lambda file: file.write_text("{}"), "is new"),
    ],
)
def test_a_changed_file_is_named(folder: Path, name: str, change: object, said: str) -> None:
    first = weight_state(folder, ModelConfig())
    assert callable(change)
    change(folder / name)
    with pytest.raises(WeightsChanged, match=f"^{name} {said} since"):
        require_same(first, weight_state(folder, ModelConfig()))
    with pytest.raises(WeightsChanged, match=f"^{name} "):
        require_same(weight_state(folder, ModelConfig()), first)


def test_the_same_files_are_the_same_elsewhere_and_under_another_inode(folder: Path, tmp_path: Path) -> None:
    first = weight_state(folder, ModelConfig())
    shutil.copytree(folder, tmp_path / "copy")  # with the times of the files
    require_same(first, weight_state(tmp_path / "copy", ModelConfig()))


def test_a_small_file_that_was_written_again_is_the_same(folder: Path) -> None:
    first = weight_state(folder, ModelConfig())
    os.utime(folder / "config.json", ns=(1, 1))
    require_same(first, weight_state(folder, ModelConfig()))


def test_random_weights_have_no_files(folder: Path) -> None:
    assert weight_state(folder, ModelConfig(load_format="dummy")) == ()
