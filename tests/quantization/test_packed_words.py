"""GPTQ and AWQ: files packed number by number, as the formats are documented; the same weights and tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_words import AWQ, GPTQ, GptqWriter, awq_writer
from quantized_llama import check_tokens, linears, load, tiny_llama, tokens_of, write_model

from troupellm.kernels.quantized import QuantizedWeight
from troupellm.models.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format

VARIANTS: dict[str, dict[str, Any]] = {
    "v1_symmetric": {},
    "v1_asymmetric": {"sym": False},
    "v2_asymmetric": {"sym": False, "checkpoint_format": "gptq_v2"},
    "act_order": {"desc_act": True, "sym": False},
    "one_group": {"group_size": -1},
    "uneven_groups": {"group_size": 48},
    "eight_bits": {"bits": 8},
    "eight_bits_asymmetric": {"bits": 8, "sym": False, "group_size": -1},
    "layers_apart": {"dynamic": {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}},
}


@pytest.mark.parametrize("name", [*VARIANTS, "awq"])
def test_weights_and_tokens_are_those_that_were_packed(tmp_path: Path, name: str) -> None:
    model = tiny_llama()
    config = AWQ | {"modules_to_not_convert": ["v_proj"]} if name == "awq" else GPTQ | VARIANTS[name]
    writer = awq_writer if name == "awq" else GptqWriter(config)
    folder = write_model(tmp_path, model, writer, config, shards=3 if name == "act_order" else 1)
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    plain = {"awq": ("lm_head", "v_proj"), "layers_apart": ("lm_head", "o_proj")}.get(name, ("lm_head",))
    for layer, module in linears(model).items():
        weight = stored.linear(layer, tuple(module.weight.shape))
        assert isinstance(weight, QuantizedWeight) != layer.endswith(plain)
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(values, module.weight.detach(), rtol=1e-6, atol=1e-7)
    worker, _ = load(folder)
    check_tokens(model, tokens_of(worker))
    worker.close()
