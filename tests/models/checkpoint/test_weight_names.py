"""The text part of a checkpoint that sees images is found under its newer and its older names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair

OLDER = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma3"), FAMILIES["gemma3_with_images"]())


def renamed(tensors: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        old = next((beginning for beginning in names if name.startswith(beginning)), None)
        found[name if old is None else names[old] + name.removeprefix(old)] = tensor
    return found


def read(pair: Pair, folder: Path) -> Decoder:
    checkpoint = Checkpoint(folder, torch.float32)
    decoder = Decoder(pair.config, decoder_weights(pair.config, checkpoint, EMBEDDING), max_model_len=MAX_LEN)
    checkpoint.finish()
    return decoder


def test_older_and_newer_names_are_the_same_model(pair: Pair, tmp_path: Path) -> None:
    tensors = load_file(pair.folder / "model.safetensors")
    newer = renamed(tensors, {old: new for new, old in OLDER.items()})
    for number, names in enumerate((newer, renamed(newer, OLDER))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(names, folder / "model.safetensors")
        decoder = read(pair, folder)
        assert torch.equal(decoder.embedding.table, pair.decoder.embedding.table)
        assert torch.equal(decoder.norm, pair.decoder.norm)
    assert set(newer) != set(renamed(newer, OLDER))


@pytest.mark.parametrize("part", ["model.aligner.fc1", "model.vision_encoder.norm", "model.vision_projection.norm"])
def test_parts_of_deepseek_vl_and_lighton_ocr_are_left_out(pair: Pair, part: str, tmp_path: Path) -> None:
    tensors = load_file(pair.folder / "model.safetensors")
    save_file(tensors | {f"{part}.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert torch.equal(read(pair, tmp_path).norm, pair.decoder.norm)


def test_a_part_that_nobody_knows_is_refused(pair: Pair, tmp_path: Path) -> None:
    tensors = load_file(pair.folder / "model.safetensors")
    save_file(tensors | {"video_tower.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unknown tensor video_tower\.weight"):
        read(pair, tmp_path)


@pytest.mark.parametrize("part", ["k_proj.bias", "v_proj.weight.absmax", "v_proj.qweight", "k_norm.weight"])
def test_layers_that_read_the_keys_of_another_leave_out_all_of_their_own(part: str, tmp_path: Path) -> None:
    shared = Pair(tmp_path, FAMILIES["gemma4_shared"]())
    layer = next(number for number, shape in enumerate(shared.config.layers) if shape.kv_from is not None)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {f"model.layers.{layer}.self_attn.{part}": torch.zeros(2)}
    save_file(tensors | own, tmp_path / "model.safetensors")
    assert torch.equal(read(shared, tmp_path).norm, shared.decoder.norm)
    save_file(
        tensors | {f"model.layers.{layer}.self_attn.k_projection": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelLoadError, match="unknown tensor"):
        read(shared, tmp_path)
