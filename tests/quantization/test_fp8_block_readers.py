"""Blocks of eight-bit floats mean what the readers of compressed-tensors and of transformers take them for."""

from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from safetensors.torch import load_file

from troupellm.kernels.quantized_linear import Fp8
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.tests.support.quantized.fp8_blocks import blocks
from troupellm.tests.support.quantized.quantized_llama import (
    check_tokens,
    linears,
    load,
    tiny_llama,
    tokens_of,
    write_model,
)

RAGGED, EVEN = (48, 40), (32, 16)
"""The first divides none of the shapes; transformers reads only what divides all."""


def written(folder: Path, block: tuple[int, int], *, powers: bool = False) -> Path:
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
        "weight_block_size": list(block),
        "scale_fmt": "ue8m0" if powers else "float",
    }
    return write_model(folder, tiny_llama(), lambda _, weight: blocks(weight, block, powers=powers), config)


def check_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Of all quantized layers, by their names."""
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    for name, weight in expected.items():
        ours = stored.linear(name, tuple(weight.shape))
        assert isinstance(ours, Fp8)
        assert torch.equal(ours.dequantize(), weight)


def test_tiles_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    folder = written(tmp_path, RAGGED)
    theirs = FP8BlockDequantizer.from_pretrained(folder, weight_block_size=RAGGED, dtype=torch.float32)
    tensors = theirs.validate(load_file(folder / "model.safetensors"))
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(2) for part in ("gate", "up", "down")]
    check_weights(folder, {name: tensors[f"{name}.weight"] for name in names})


@pytest.mark.parametrize("powers", [False, True], ids=["float", "ue8m0"])
def test_weights_and_tokens_are_those_of_transformers(tmp_path: Path, powers: bool) -> None:
    folder = written(tmp_path, EVEN, powers=powers)
    plain = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=EVEN)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=plain
    ).eval()
    check_weights(folder, {name: layer.weight for name, layer in linears(model).items() if name != "lm_head"})
    worker, _ = load(folder)
    check_tokens(model, tokens_of(worker))
    worker.close()
