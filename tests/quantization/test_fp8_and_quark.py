"""fp8 and Quark: files written here number by number, as the formats are documented; the same weights and tokens."""

from pathlib import Path

import pytest
import torch

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.tests.support.quantized.float_formats import FORMATS
from troupellm.tests.support.quantized.quantized_llama import (
    check_tokens,
    linears,
    load,
    quantize_inputs,
    signal_to_error,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)

WITH_INPUTS = {"quark_fp8_inputs", "quark_int8", *(name for name in FORMATS if name.startswith("fp8"))}
"""Both sides are to be in eight bits."""


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_tokens_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    model, (config, store, fewest) = tiny_llama(), FORMATS[name]
    before = {layer: module.weight.detach().clone() for layer, module in linears(model).items()}
    folder = write_model(tmp_path, model, store, config, shards=2 if name == "fp8_block" else 1)
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    for layer, module in linears(model).items():
        weight = take_outlined(stored, layer, tuple(module.weight.shape))
        plain = layer == "lm_head" or (name == "quark_mixed" and layer == "model.layers.1.mlp.up_proj")
        assert isinstance(weight, QuantizedWeight) != plain
        if isinstance(weight, QuantizedWeight):
            assert weight.outlines[0].eight_bit_inputs == (name in WITH_INPUTS)
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(values, module.weight.detach(), rtol=1e-6, atol=1e-7)
        assert plain or signal_to_error(before[layer], values) > fewest
    worker, seen = load(folder)
    if name == "quark_int8":
        quantize_inputs(model)
    check_tokens(model, tokens_of(worker), 0.05 if name == "quark_int8" else 1e-4)
    assert any("calibrated input scales" in progress.detail for progress in seen) == (name == "fp8_static")
    worker.close()
