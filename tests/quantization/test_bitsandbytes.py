"""bitsandbytes: files written number by number, as it documents them; equal weights, to the bit, and tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.load.architecture import describe_model
from troupellm.models.memory.stored_size import stored_size
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.quantized.bitsandbytes_files import four_bits, int8
from troupellm.tests.support.quantized.quantized_llama import (
    Store,
    check_tokens,
    linears,
    load,
    save_sharded,
    signal_to_error,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)

LAYER = "model.layers.1.mlp.down_proj"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
FOUR = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_has_fp16_weight": False, "llm_int8_threshold": 6.0,
}  # fmt: skip
EIGHT = FOUR | {"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True, "_load_in_8bit": True}
STORES: dict[str, Store] = {
    "nf4": lambda _, weight: four_bits(weight, "nf4", nested=False),
    "nf4_nested": lambda _, weight: four_bits(weight, "nf4", nested=True),
    "fp4": lambda _, weight: four_bits(weight, "fp4", nested=False),
    "fp4_nested": lambda _, weight: four_bits(weight, "fp4", nested=True),
    "int8": lambda _, weight: int8(weight),
}


def written(folder: Path, name: str) -> tuple[Path, torch.nn.Module]:
    """Rows of 160 inputs: their blocks go on in the next row."""
    model = tiny_llama(intermediate_size=160)
    return write_model(folder, model, STORES[name], EIGHT if name == "int8" else FOUR), model


def opened(folder: Path) -> QuantizedCheckpoint:
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    return QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)


@pytest.mark.parametrize("name", STORES)
def test_weights_and_tokens_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    folder, model = written(tmp_path, name)
    stored = opened(folder)
    for layer, module in linears(model).items():
        weight = take_outlined(stored, layer, tuple(module.weight.shape))
        assert isinstance(weight, QuantizedWeight) == (layer != "lm_head")
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        exact = 2e-7 if name == "int8" else 0.0  # the scale of eight bits is divided by 127 first
        torch.testing.assert_close(values, module.weight.detach(), rtol=exact, atol=0.0)
    worker, _ = load(folder)
    check_tokens(model, tokens_of(worker))
    worker.close()


def test_memory_is_planned_for_the_weights_alone(tmp_path: Path) -> None:
    """Codes of four bits are dequantized here; scales, tables and states leave nothing behind."""
    folder, model = written(tmp_path, "nf4_nested")
    form, described = read_format(ConfigReader.load(folder)), describe_model(folder)
    size = stored_size(folder, described, form, torch.float32, torch.device("cpu"))
    assert size is not None
    assert size.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def swapped(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"] << 4 | tensors[f"{LAYER}.weight"] >> 4


def moved(tensors: dict[str, Tensor]) -> None:
    """Every block has the scale of the one before."""
    tensors[f"{LAYER}.weight.absmax"] = tensors[f"{LAYER}.weight.absmax"].roll(1)


@pytest.mark.parametrize("change", [swapped, moved])
def test_pairs_in_the_other_order_and_moved_scales_are_other_weights(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    """Controls: the comparison above sees both."""
    folder, model = written(tmp_path, "nf4")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_sharded(folder, tensors)
    expected = linears(model)[LAYER].weight.detach()
    weight = opened(folder).linear(LAYER, tuple(expected.shape))
    assert isinstance(weight, QuantizedWeight)
    assert signal_to_error(expected, weight.dequantize()) < 15


def state(**changes: Any) -> Tensor:
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 160]} | changes
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (STATE, state(shape=[160, 64]), r"quant_state\.bitsandbytes__nf4 has shape \[160, 64\], expected \[64, 160\]"),
        (STATE, state(blocksize=0), r"bitsandbytes__nf4 cannot be read: Expected `int` >= 1 - at `\$.blocksize`"),
        (STATE, state(codebook=[1]), "cannot be read: Object contains unknown field `codebook`"),
        (STATE, torch.full((9,), 255, dtype=torch.uint8), "bitsandbytes__nf4 cannot be read"),
        (STATE, torch.zeros(5000, dtype=torch.uint8), r"has shape \[5000\], expected at most 4096 bytes in a row"),
        (STATE, torch.zeros(2, 2, dtype=torch.uint8), r"has shape \[2, 2\], expected at most 4096 bytes in a row"),
        (STATE, state(blocksize=128), r"weight\.absmax has shape \[160\], expected \[80\]"),
        (f"{LAYER}.weight.quant_map", torch.zeros(15), r"weight\.quant_map has shape \[15\], expected \[16\]"),
        (f"{LAYER}.weight.absmax", torch.zeros(160).half(), r"weight\.absmax has type F16, expected one of F32"),
        (
            f"{LAYER}.weight",
            torch.zeros(5121, 1, dtype=torch.uint8),
            r"weight has shape \[5121, 1\], expected \[5120, 1",
        ),
    ],
)
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    folder, _ = written(tmp_path, "nf4")
    save_sharded(folder, load_file(folder / "model.safetensors") | {name: tensor})
    with pytest.raises(ModelLoadError, match=message) as caught:
        opened(folder).linear(LAYER, (64, 160))
    assert "\n" not in caught.value.message


def test_eight_bits_in_another_layout_than_rows_are_refused(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "int8")
    tensors = load_file(folder / "model.safetensors")
    save_sharded(folder, tensors | {f"{LAYER}.weight_format": torch.tensor(1, dtype=torch.uint8)})
    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.weight_format must be 0: codes in rows"):
        opened(folder).linear(LAYER, (64, 160))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bnb_4bit_quant_storage": "bfloat16"}, 'bnb_4bit_quant_storage must be one of uint8, got "bfloat16"'),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight must be false, got true"),
        ({"load_in_4bit": "yes"}, "load_in_4bit must be true or false"),
        ({"codebook": "own"}, 'codebook is not supported, got "own"'),
    ],
)
def test_settings_that_are_not_read_are_refused_by_their_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"quantization_config\.{message}"):
        read_format(ConfigReader({"quantization_config": FOUR | config}))
