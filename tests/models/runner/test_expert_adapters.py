"""Adapters of experts give the tokens of the model that they are merged into, beside others and the base model."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from troupellm.models.adapters.adapter import read_adapter
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.protocol.messages.worker import AdapterSlot
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt

PROMPT, NEW_TOKENS, RANK, SCALE = make_prompt(19), 8, 2, 2.0


def stacked(pair: Pair, layer: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """As PEFT names the tensors that transformers 5 has."""
    moe, hidden = pair.config.experts, pair.config.hidden_size
    assert moe is not None
    begin, rows = f"base_model.model.model.layers.{layer}.mlp.experts", moe.num_experts * RANK
    size = moe.intermediate_size
    return {
        f"{begin}.base_layer.lora_A.weight": torch.randn(rows, hidden, generator=drawn) * 0.3,
        f"{begin}.base_layer.lora_B.weight": torch.randn(2 * size, rows, generator=drawn) * 0.3,
        f"{begin}.lora_A.weight": torch.randn(rows, size, generator=drawn) * 0.3,
        f"{begin}.lora_B.weight": torch.randn(hidden, rows, generator=drawn) * 0.3,
    }


def single(pair: Pair, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same adapter by the older names of each expert."""
    moe, found = pair.config.experts, dict[str, Tensor]()
    assert moe is not None
    count, size, names = moe.num_experts, moe.intermediate_size, moe.names
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        begin = key.removesuffix(".lora_A.weight")
        down = tensors[key].view(count, RANK, -1)
        up = tensors[f"{begin}.lora_B.weight"].view(-1, RANK, count).permute(2, 0, 1)
        parts = {names.gate: up[:, :size], names.up: up[:, size:]} if "base_layer" in begin else {names.down: up}
        for expert in range(count):
            for name, rows in parts.items():
                module = f"{begin.removesuffix('.base_layer')}.{expert}.{name}"
                found[f"{module}.lora_A.weight"] = down[expert].clone()
                found[f"{module}.lora_B.weight"] = rows[expert].contiguous().clone()
    return found


def merged(pair: Pair, tensors: dict[str, Tensor], layer: int) -> list[int]:
    """The tokens of the model of transformers with the adapter in its weights."""
    found = copy.copy(pair)
    found.reference = copy.deepcopy(pair.reference)
    experts = found.reference.model.layers[layer].mlp.experts
    assert pair.config.experts is not None
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        begin = key.removesuffix(".lora_A.weight")
        down = tensors[key].view(pair.config.experts.num_experts, RANK, -1)
        up = tensors[f"{begin}.lora_B.weight"].view(-1, RANK, pair.config.experts.num_experts)
        added = SCALE * torch.einsum("ore,eri->eoi", up, down)
        weight = experts.gate_up_proj if "base_layer" in begin else experts.down_proj
        with torch.no_grad():
            weight += added.transpose(1, 2) if weight.shape != added.shape else added
    return found.greedy(PROMPT, NEW_TOKENS)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_of_both_forms_answer_as_the_merged_model(family: str, tmp_path: Path) -> None:
    pair, drawn = Pair(tmp_path / "model", FAMILIES[family]()), torch.Generator().manual_seed(1)
    assert pair.config.experts is not None
    layers = [layer for layer, shape in enumerate(pair.config.layers) if shape.experts is not None]
    one, other = (stacked(pair, layer, drawn) for layer in (layers[0], layers[-1]))
    forms = {
        "stacked": one,
        "single": one if pair.config.experts.names.interleaved else single(pair, one),
        "other": other,
    }
    adapters = {}
    for name, tensors in forms.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        adapters[name] = read_adapter(tmp_path / name, pair.config, 8)
    by_digest = {adapter.digest: adapter for adapter in adapters.values()}
    slots = AdapterSlots(
        pair.config, by_digest.get, num_slots=3, max_rank=8, dtype=torch.float32, device=torch.device("cpu")
    )
    expected = [merged(pair, one, layers[0])] * 2 + [merged(pair, other, layers[-1]), pair.greedy(PROMPT, NEW_TOKENS)]
    assert len(set(map(tuple, expected))) == 3
    for chunk in (100, 5):
        driver = Driver(pair.runner(adapters=slots))
        driver.slots = tuple(AdapterSlot(slot, adapter.digest) for slot, adapter in enumerate(adapters.values(), 1))
        for row, slot in enumerate((1, 2, 3, 0)):
            driver.submit(row, PROMPT, slot)
        while any(driver.generated(row) < NEW_TOKENS for row in range(4)):
            driver.run({row: min(chunk, len(driver.tokens[row]) - driver.done[row]) for row in range(4)})
        assert [driver.answer(row)[:NEW_TOKENS] for row in range(4)] == expected
