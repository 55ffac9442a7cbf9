"""A layer that a compressed-tensors file holds as plain floats is taken so, under every name in `ignore`."""

from pathlib import Path

import torch
from torch import Tensor

from troupellm.tests.support.quantized.quantized_llama import check_tokens, load, tiny_llama, tokens_of, write_model

FORMAT = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["language_model.lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
}  # fmt: skip


def codes(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    values = torch.round(weight / scale).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def test_a_head_under_another_name(tmp_path: Path) -> None:
    model = tiny_llama()
    worker, _ = load(write_model(tmp_path, model, codes, FORMAT))
    check_tokens(model, tokens_of(worker))
    worker.close()
