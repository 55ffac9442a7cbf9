"""Checkpoints are read strictly: every refusal is one line that names file and tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from troupellm.models.checkpoint.safetensors import Checkpoint, RandomWeights
from troupellm.models.hub.weight_files import INDEX, SINGLE, folder_weight_files
from troupellm.protocol.errors import ModelLoadError


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = SINGLE) -> None:
    save_file(tensors, folder / name)


def refusal(folder: Path, name: str = "a", shape: tuple[int, ...] = (2, 3)) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Checkpoint(folder, torch.float32).take(name, shape)
    assert "\n" not in caught.value.message
    assert str(folder) not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_converted_and_counted(tmp_path: Path, stored: torch.dtype) -> None:
    values = torch.tensor([[1.0, -2.5, 0.25], [0.0, 3.0, 8.0]])
    write(tmp_path, {"a": values.to(stored)})
    sizes: list[int] = []
    checkpoint = Checkpoint(tmp_path, torch.float32, sizes.append)
    taken = checkpoint.take("a", (2, 3))
    checkpoint.finish()
    assert taken.dtype == torch.float32
    assert torch.equal(taken, values)
    assert sizes == [24]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"b": torch.zeros(2, 3)})
    assert refusal(tmp_path) == "model.safetensors: tensor a is missing"


def test_a_tensor_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(3, 2)})
    assert refusal(tmp_path) == "model.safetensors: tensor a has shape [3, 2], expected [2, 3]"


def test_a_tensor_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(2, 3, dtype=torch.int32)})
    assert refusal(tmp_path) == "model.safetensors: tensor a has type I32, expected one of BF16, F16, F32"


def test_unknown_tensors_but_not_derived_buffers(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1), "x.rotary_emb.inv_freq": torch.zeros(1)})
    checkpoint = Checkpoint(tmp_path, torch.float32)
    checkpoint.take("a", (1,))
    with pytest.raises(ModelLoadError, match=r"^model.safetensors: unknown tensor b$"):
        checkpoint.finish()
    checkpoint.ignore("b")
    checkpoint.finish()


def test_shards_through_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(1)}, "one.safetensors")
    write(tmp_path, {"b": torch.ones(2)}, "two.safetensors")
    names = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    checkpoint = Checkpoint(tmp_path, torch.float32)
    assert checkpoint.take("b", (2,)).tolist() == [1, 1]
    assert checkpoint.take("a", (1,)).tolist() == [1]
    checkpoint.finish()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for file in ("one.safetensors", "two.safetensors"):
        write(tmp_path, {"a": torch.ones(1)}, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert refusal(tmp_path) == "two.safetensors: tensor a is in one.safetensors too"


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/tmp/out.safetensors", "sub/out.safetensors", "weights.bin", "..", ""]
)
def test_an_index_may_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"a": torch.ones(1)}, "out.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "is not the name of a safetensors file in this folder" in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert refusal(tmp_path).startswith(INDEX)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert refusal(tmp_path) == f"one.safetensors is missing, though {INDEX} names it"


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_damaged_weight_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert refusal(tmp_path).startswith(("model.safetensors cannot be read", "model.safetensors is cut"))


def test_pickled_weights_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="only pickled weights") as caught:
        folder_weight_files(tmp_path)
    assert caught.value.hint is not None
    assert "safetensors" in caught.value.hint


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "model.safetensors is missing"


def test_random_weights_repeat_with_their_seed() -> None:
    first, second, other = (RandomWeights(torch.float32, seed).take("a", (4, 4)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert RandomWeights(torch.float32).take("norm.weight", (2,)).tolist() == [1, 1]
    assert RandomWeights(torch.float32).take("q_proj.bias", (2,)).tolist() == [0, 0]
