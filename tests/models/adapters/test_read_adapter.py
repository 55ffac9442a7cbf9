"""Reading an adapter: which folders are served, and the sentence for each that is not."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.files import adapter_digest, adapter_header
from troupellm.models.config.decoder_config import DecoderConfig, MoeConfig
from troupellm.protocol.errors import AdapterError
from troupellm.tests.support.adapters.peft_folders import MODEL, write_adapter

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"


def read(folder: Path, model: DecoderConfig = MODEL, max_rank: int = 16) -> Adapter:
    return read_adapter(folder, model, max_rank)


def refusal(folder: Path, model: DecoderConfig = MODEL, max_rank: int = 16) -> str:
    with pytest.raises(AdapterError) as caught:
        read(folder, model, max_rank)
    assert "\n" not in caught.value.message
    assert str(folder) not in caught.value.message
    return caught.value.message


def test_the_scale_is_part_of_the_second_matrix(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path, MODEL, ("q_proj",), rank=4, lora_alpha=12)
    part = read(tmp_path).sites[0, "qkv"][0]
    assert part is not None
    assert torch.equal(part.down, tensors[f"{QUERY}.lora_A.weight"])
    assert torch.equal(part.up, tensors[f"{QUERY}.lora_B.weight"] * 3.0)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path, MODEL, ("q_proj",), rank=4, lora_alpha=12, use_rslora=True)
    part = read(tmp_path).sites[0, "qkv"][0]
    assert part is not None
    assert torch.equal(part.up, tensors[f"{QUERY}.lora_B.weight"] * 6.0)


def test_patterns_give_single_modules_another_rank_and_scale(tmp_path: Path) -> None:
    pattern = {"layers.1.self_attn.q_proj": 8}
    write_adapter(tmp_path, MODEL, ("q_proj",), rank=2, rank_pattern=pattern, alpha_pattern={r"layers\.1\..*q_proj": 8})
    adapter = read(tmp_path)
    ranks = [part.down.shape[0] for layer in range(2) if (part := adapter.sites[layer, "qkv"][0]) is not None]
    assert ranks == [2, 8]
    assert adapter.rank == 8
    assert adapter_header(tmp_path).rank == 8


@pytest.mark.parametrize("body", ["model.", "", "model.language_model.", "language_model.model."])
def test_names_of_a_language_part_are_those_of_the_decoder(tmp_path: Path, body: str) -> None:
    write_adapter(tmp_path, MODEL, body=body)
    assert len(read(tmp_path).sites) == 8


def test_the_header_tells_the_size_without_the_weights(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path, MODEL, rank=3, base_model_name_or_path="acme/base")
    header = adapter_header(tmp_path)
    assert header.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert (header.rank, header.base_model_name) == (3, "acme/base")


def test_the_digest_follows_the_numbers_and_the_settings_that_count(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", MODEL)
    write_adapter(tmp_path / "same", MODEL, lora_dropout=0.3, base_model_name_or_path="acme/base")
    write_adapter(tmp_path / "scale", MODEL, lora_alpha=5)
    write_adapter(tmp_path / "numbers", MODEL, seed=1)
    one, same, scale, numbers = (adapter_digest(tmp_path / name) for name in ("one", "same", "scale", "numbers"))
    assert one == same == read(tmp_path / "one").digest
    assert len({one, scale, numbers}) == 3


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "has no lora_magnitude_vector beside it"),
    ({"use_dora": "yes"}, "use_dora must be true or false"),
    ({"use_qalora": True}, "use_qalora"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"bias": "all"}, 'bias "all" (trained biases)'),
    ({"peft_type": "IA3"}, 'peft_type "IA3" is not served; use LORA'),
    ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    ({"a_later_feature": {"on": 1}}, "the key a_later_feature is not known"),
    ({"r": 0}, "r must be an integer from 1 on, not 0"),
    ({"r": True}, "r must be an integer"),
    ({"lora_alpha": "8"}, "lora_alpha must be a number"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ({"rank_pattern": {"(a+)+": 4}}, "no plain name or simple regular expression"),
    ({"alpha_pattern": {"(": 4}}, "no plain name or simple regular expression"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj must be a number"),
    ({"r": 8}, "expected [8, 24] for this model and rank 8"),
    ({"lora_bias": True}, "has no lora_B.bias beside it"),
]


@pytest.mark.parametrize(("settings", "text"), SETTINGS, ids=[text[:24] for _, text in SETTINGS])
def test_settings_that_would_change_the_result_are_refused_by_their_key(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    write_adapter(tmp_path, MODEL)
    config = json.loads((tmp_path / CONFIG).read_bytes())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **settings}))
    assert text in refusal(tmp_path)


TENSORS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({f"{HEAD}.weight": torch.ones(41, 16)}, "lm_head.weight has shape [41, 16], expected [40, 16]"),
    ({f"{HEAD}.bias": torch.ones(40)}, "lm_head.bias is a whole one (modules_to_save)"),
    ({"base_model.model.model.norm.weight": torch.ones(16)}, "norm.weight is a whole weight (modules_to_save)"),
    ({f"{QUERY}.lora_magnitude_vector": torch.ones(16)}, "is of DoRA, but use_dora is false"),
    ({f"{EMBEDDING}.lora_embedding_A": torch.ones(4, 40)}, "has no lora_embedding_B beside it"),
    ({f"{EMBEDDING}.lora_A.weight": torch.ones(4, 40)}, "has no lora_embedding_A beside it"),
    ({f"{QUERY}.lora_embedding_A": torch.ones(4, 16)}, "is not one of this module's"),
    ({f"{QUERY}.weight": torch.ones(16, 16)}, "is for the same module as"),
    ({"base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.ones(8, 16)}, "has no lora_B.weight"),
    ({"base_model.model.model.layers.2.mlp.up_proj.lora_A.weight": torch.ones(4, 16)}, "does not have"),
    ({"base_model.model.model.visual.q_proj.lora_A.weight": torch.ones(4, 16)}, "does not have"),
    ({"model.layers.0.q_proj.lora_A.weight": torch.ones(4, 16)}, "does not begin with base_model.model."),
    ({f"{QUERY}.lora_C.weight": torch.ones(4, 16)}, "is not known"),
    ({f"{QUERY}.lora_B.weight": None}, "q_proj.lora_A.weight has no lora_B.weight beside it"),
    ({f"{QUERY}.lora_B.bias": torch.ones(16)}, "is a bias, but lora_bias is false"),
    ({f"{QUERY}.base_layer.weight": torch.ones(16, 16)}, "q_proj.base_layer.weight is a whole weight"),
    ({f"{EMBEDDING}.base_layer.weight": torch.ones(40, 16)}, "has no lora_embedding_A beside it"),
    ({f"{QUERY}.lora_A.weight": torch.ones(4, 17)}, "has shape [4, 17], expected [4, 16]"),
    ({f"{QUERY}.lora_B.weight": torch.ones(15, 4)}, "has shape [15, 4], expected [16, 4]"),
    ({f"{QUERY}.lora_A.weight": torch.ones(4, 16).int()}, "has type I32, expected one of BF16, F16, F32"),
    ({f"{QUERY}.lora_A.weight": torch.full((4, 16), float("nan"))}, "has NaN or infinite numbers"),
    ({f"{QUERY}.lora_B.weight": torch.full((16, 4), 3e38)}, "has NaN or infinite numbers"),
    ({"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 16)}, "is for the same module as"),
]


@pytest.mark.parametrize(("changed", "text"), TENSORS, ids=[text[:24] for _, text in TENSORS])
def test_tensors_without_a_place_are_refused_by_name(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], text: str
) -> None:
    write_adapter(tmp_path, MODEL, changed=changed)
    assert text in refusal(tmp_path)


def test_a_rank_above_the_slots_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, rank=12)
    assert "rank 12" in refusal(tmp_path, max_rank=8)
    assert "at most 8; start it with --max-lora-rank 12" in refusal(tmp_path, max_rank=8)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, msgspec.structs.replace(MODEL, hidden_size=32))
    assert "has shape [32, 4], expected [16, 4] for this model" in refusal(tmp_path)


def test_a_layer_with_experts_takes_no_adapter_of_its_feed_forward_part(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    moe = MoeConfig(num_experts=2, top_k=1, intermediate_size=8)
    said = refusal(tmp_path, MODEL.with_layers(experts=(None, moe)))
    assert "layers.1.mlp.down_proj" in said
    assert "takes no adapter" in said


def cut(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 10)


def without_header(folder: Path) -> None:
    (folder / FILE).write_bytes(b"no safetensors file at all, but text")


def header_of_the_rank_only(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**40, 16], "data_offsets": [0, 2**46]}
    header = json.dumps({f"{QUERY}.lora_A.weight": entry}).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header)


def wrong_offsets(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 4]}
    header = json.dumps({f"{QUERY}.lora_A.weight": entry}).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"1234")


def pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def link_out(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")


def pickled(folder: Path) -> None:
    (folder / FILE).rename(folder / "adapter_model.bin")


def no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def no_weights(folder: Path) -> None:
    (folder / FILE).unlink()


def empty(folder: Path) -> None:
    save_file({}, folder / FILE)


def config_is_a_list(folder: Path) -> None:
    (folder / CONFIG).write_text("[]")


FILES = [
    (cut, "is cut"),
    (without_header, "does not begin like a safetensors file"),
    (header_of_the_rank_only, "is cut"),
    (wrong_offsets, "has other bytes than its shape says"),
    (pipe, "is no regular file"),
    (link_out, "is a link out of it"),
    (pickled, "adapter_model.bin is pickled and is not read; save the adapter again with safe_serialization=True"),
    (no_config, "adapter_config.json is missing"),
    (no_weights, "adapter_model.safetensors is missing"),
    (empty, "has no tensors"),
    (config_is_a_list, "expected an object"),
]


@pytest.mark.parametrize(("damage", "text"), FILES, ids=[damage.__name__ for damage, _ in FILES])
def test_damaged_and_odd_files_are_refused(tmp_path: Path, damage: Any, text: str) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, MODEL)
    damage(folder)
    assert text in refusal(folder)
