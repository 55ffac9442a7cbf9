"""Adapters of experts: which are read, and the sentence for each that is not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.files import adapter_header
from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.protocol.errors import AdapterError
from troupellm.tests.support.adapters.peft_folders import MODEL

COUNT, SIZE, HIDDEN, RANK = 3, 8, 16, 2
NAMES = ExpertNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2")
MOE = MoeConfig(num_experts=COUNT, top_k=1, intermediate_size=SIZE, names=NAMES)
SPARSE = MODEL.with_layers(experts=(None, MOE))
BLOCK = "base_model.model.model.layers.1.mlp.experts"


def written(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def stacked() -> dict[str, Tensor]:
    """PEFT wraps the first tensor, and then the second one around it."""
    return {
        f"{BLOCK}.base_layer.lora_A.weight": torch.randn(COUNT * RANK, HIDDEN),
        f"{BLOCK}.base_layer.lora_B.weight": torch.randn(2 * SIZE, COUNT * RANK),
        f"{BLOCK}.lora_A.weight": torch.randn(COUNT * RANK, SIZE),
        f"{BLOCK}.lora_B.weight": torch.randn(HIDDEN, COUNT * RANK),
    }


def single(block: str = "block_sparse_moe") -> dict[str, Tensor]:
    """Of two experts, the second one of which has no gate."""
    start, found = f"base_model.model.model.layers.1.{block}.experts", {}
    for expert, name in ((0, "w1"), (0, "w3"), (0, "w2"), (2, "w3")):
        inputs, outputs = (SIZE, HIDDEN) if name == "w2" else (HIDDEN, SIZE)
        found[f"{start}.{expert}.{name}.lora_A.weight"] = torch.randn(RANK, inputs)
        found[f"{start}.{expert}.{name}.lora_B.weight"] = torch.randn(outputs, RANK)
    return found


def read(folder: Path, model: DecoderConfig = SPARSE, **options: Any) -> Adapter:
    return read_adapter(folder, model, 8, **options)


def products(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """The additions to the weights of all experts: [experts, out, in] of gate and up, and of down."""
    found = adapter.experts[1]
    assert found.gate_up is not None
    assert found.down is not None
    return found.gate_up.up @ found.gate_up.down, found.down.up @ found.down.down


@pytest.mark.parametrize("interleaved", [False, True])
def test_stacked_experts_are_read_as_peft_multiplies_them(tmp_path: Path, interleaved: bool) -> None:
    tensors = stacked()
    names = msgspec.structs.replace(NAMES, interleaved=interleaved)
    model = SPARSE.with_layers(experts=(None, msgspec.structs.replace(MOE, names=names)))
    adapter = read(written(tmp_path, tensors, target_parameters=["mlp.experts.gate_up_proj"]), model)
    expected = []
    for begin in (f"{BLOCK}.base_layer", BLOCK):
        first = tensors[f"{begin}.lora_A.weight"].reshape(COUNT, RANK, -1)
        second = tensors[f"{begin}.lora_B.weight"].reshape(-1, RANK, COUNT)
        expected.append(torch.einsum("ore,eri->eoi", second, first) * 2.0)
    if interleaved:  # rows of gate and up by turns
        expected[0] = torch.cat((expected[0][:, 0::2], expected[0][:, 1::2]), dim=1)
    for ours, theirs in zip(products(adapter), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (adapter.rank, adapter_header(tmp_path).rank) == (RANK, RANK)
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_single_experts_are_read_into_one_tensor(tmp_path: Path, block: str) -> None:
    tensors = single(block)
    gate_up, down = products(read(written(tmp_path, tensors)))
    start = f"base_model.model.model.layers.1.{block}.experts"

    def product(name: str) -> Tensor:
        return 2.0 * tensors[f"{start}.{name}.lora_B.weight"] @ tensors[f"{start}.{name}.lora_A.weight"]

    expected, narrow = torch.zeros(COUNT, 2 * SIZE, HIDDEN), torch.zeros(COUNT, HIDDEN, SIZE)
    expected[0] = torch.cat((product("0.w1"), product("0.w3")))
    expected[2, SIZE:] = product("2.w3")
    narrow[0] = product("0.w2")
    torch.testing.assert_close(gate_up, expected)
    torch.testing.assert_close(down, narrow)


REFUSED: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
    ({f"{BLOCK}.lora_A.weight": torch.ones(6, 16)}, {}, "has no lora_B.weight beside it"),
    ({f"{BLOCK}.lora_B.bias": torch.ones(16)}, {"lora_bias": True}, "is none of an expert's adapter"),
    (stacked() | single("mlp"), {}, "is for the same experts as another one"),
    (stacked() | {f"{BLOCK}.lora_A.weight": torch.ones(7, SIZE)}, {}, "has shape [7, 8], expected [6, 8]"),
    (stacked(), {"r": 9}, "rank 9 at"),
    (
        {name.replace("layers.1", "layers.0"): tensor for name, tensor in stacked().items()},
        {},
        "is for experts that this model does not have",
    ),
    (
        {name.replace("mlp", "moe"): tensor for name, tensor in stacked().items()},
        {},
        "is for experts that this model does not have",
    ),
    (
        {name.replace("experts.2", "experts.3"): tensor for name, tensor in single().items()},
        {},
        "is for an expert that this model does not have",
    ),
    (
        {name.replace("w3", "w4"): tensor for name, tensor in single().items()},
        {},
        "is for an expert that this model does not have",
    ),
]


@pytest.mark.parametrize(("tensors", "settings", "text"), REFUSED, ids=[text[:24] for _, _, text in REFUSED])
def test_tensors_of_experts_without_a_place_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(AdapterError) as caught:
        read(written(tmp_path, tensors, **settings))
    assert text in caught.value.message


def test_experts_are_refused_where_they_are_not_computed(tmp_path: Path) -> None:
    written(tmp_path, stacked())
    with pytest.raises(AdapterError, match="served on a CPU only, and not with --batch-invariant"):
        read(tmp_path, experts=False)
    with pytest.raises(AdapterError, match="is for experts that this model does not have"):
        read(tmp_path, MODEL)
