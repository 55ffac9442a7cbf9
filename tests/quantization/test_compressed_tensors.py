"""Checkpoints written by the compressed-tensors library itself: the same weights as it reads, the same tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

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
    save_sharded,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)

TO_THE_BIT = {"w2a16", "w3a16_asymmetric", "w6a16", "w4_in_bytes", "nvfp4", "nvfp4_inputs"}


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
            inputs = writer.scheme.input_activations
            assert weight.outlines[0].eight_bit_inputs == (inputs is not None and inputs.num_bits == 8)
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        exact = {"rtol": 0.0, "atol": 0.0} if name in TO_THE_BIT else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(values, module.weight.detach(), **exact)
    worker, seen = load(folder)
    whole_inputs = writer.config["format"] == "int-quantized"
    if whole_inputs:
        quantize_inputs(model)
    # Inputs near the middle between two numbers of eight bits may be rounded either way.
    check_tokens(model, tokens_of(worker), 0.05 if whole_inputs else 1e-4)
    assert any("calibrated input scales" in progress.detail for progress in seen) == writer.static
    worker.close()


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_older_versions_leave_the_last_bits_of_words_unused(tmp_path: Path, bits: int) -> None:
    """Words of version 0.10 and before, written by the arithmetic that they are documented with."""
    rows, columns, size, layer = 64, 96, 32, "model.layers.0.mlp.up_proj"
    values = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(bits))
    zeros = torch.randint(0, 1 << bits, (rows, columns // size), generator=torch.Generator().manual_seed(9))
    scale = torch.rand(rows, columns // size)
    stored = {
        "weight_packed": with_gaps(values, bits),
        "weight_zero_point": with_gaps(zeros.t(), bits).t(),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    save_sharded(tmp_path, {f"{layer}.{key}": tensor.contiguous() for key, tensor in stored.items()})
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    form = read_format(ConfigReader({"quantization_config": config}))
    assert form is not None
    weight = take_outlined(QuantizedCheckpoint(tmp_path, torch.float32, lambda _: None, form), layer, (rows, columns))
    assert isinstance(weight, QuantizedWeight)
    meant = (values - zeros.repeat_interleave(size, dim=1)) * scale.repeat_interleave(size, dim=1)
    assert torch.equal(weight.dequantize(), meant)


def with_gaps(numbers: Tensor, bits: int) -> Tensor:
    """As many whole numbers in a word as there is room for, along the last dimension."""
    per = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per)).unflatten(-1, (-1, per))
    words = (padded << torch.arange(0, per * bits, bits)).sum(dim=-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
