"""Checkpoints written by the compressed-tensors library itself: the same weights as it reads, the same tokens."""

from pathlib import Path

import pytest
import torch

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.tests.support.quantized.compressed_formats import SCHEMES, Writer
from troupellm.tests.support.quantized.quantized_llama import (
    check_tokens,
    linears,
    load,
    quantize_inputs,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_and_tokens_are_the_librarys(tmp_path: Path, name: str) -> None:
    model, writer = tiny_llama(), Writer(name)
    folder = write_model(tmp_path, model, writer, writer.config, shards=2 if name == "w4a16" else 1)
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    for layer, module in linears(model).items():
        weight = take_outlined(stored, layer, tuple(module.weight.shape))
        assert isinstance(weight, QuantizedWeight) == (layer != "lm_head")
        if isinstance(weight, QuantizedWeight):
            assert weight.outlines[0].eight_bit_inputs == (writer.scheme.input_activations is not None)
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(values, module.weight.detach(), rtol=1e-6, atol=1e-7)
    worker, seen = load(folder)
    whole_inputs = writer.config["format"] == "int-quantized"
    if whole_inputs:
        quantize_inputs(model)
    # Inputs near the middle between two numbers of eight bits may be rounded either way.
    check_tokens(model, tokens_of(worker), 0.05 if whole_inputs else 1e-4)
    assert any("calibrated input scales" in progress.detail for progress in seen) == writer.static
    worker.close()
