"""ModelOpt: files written number by number, as its algorithms are documented; equal weights, to the bit, and tokens."""

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
from troupellm.models.load.architecture import read_config
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.quantized.quantized_llama import (
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
from troupellm.tests.support.quantized.small_floats import LAYERS, MODELOPT

LAYER = "model.layers.1.mlp.up_proj"


def settings(algorithm: str, names: list[str]) -> dict[str, Any]:
    if algorithm != "MIXED_PRECISION":
        return {"quant_algo": algorithm, "exclude_modules": ["lm_head", "mlp.gate"]}
    layers = {name: LAYERS[last][0] for name in names if (last := name.rpartition(".")[2]) in LAYERS}
    return {"quant_algo": algorithm, "quantized_layers": {name: {"quant_algo": own} for name, own in layers.items()}}


def written(folder: Path, algorithm: str) -> tuple[Path, torch.nn.Module, dict[str, Tensor]]:
    model = tiny_llama()
    before = {name: layer.weight.detach().clone() for name, layer in linears(model).items()}
    folder = write_model(folder, model, MODELOPT[algorithm][0], {})
    described = {"producer": {"name": "modelopt"}, "quantization": settings(algorithm, list(before))}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))
    return folder, model, before


def opened(folder: Path) -> QuantizedCheckpoint:
    form = read_format(read_config(folder).reader)
    assert form is not None
    return QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_weights_and_tokens_are_those_that_were_written(tmp_path: Path, algorithm: str) -> None:
    folder, model, before = written(tmp_path, algorithm)
    stored = opened(folder)
    for name, module in linears(model).items():
        weight = take_outlined(stored, name, tuple(module.weight.shape))
        plain = name == "lm_head" or (algorithm == "MIXED_PRECISION" and name.rpartition(".")[2] not in LAYERS)
        assert isinstance(weight, QuantizedWeight) != plain
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(values, module.weight.detach())
        assert plain or signal_to_error(before[name], values) > MODELOPT[algorithm][1]
    worker, seen = load(folder)
    check_tokens(model, tokens_of(worker))
    static = algorithm in ("FP8", "NVFP4", "MIXED_PRECISION")
    assert any("modelopt: calibrated input scales" in progress.detail for progress in seen) == static
    worker.close()


def swapped(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"] << 4 | tensors[f"{LAYER}.weight"] >> 4


def inverted(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale_2"] = 1 / tensors[f"{LAYER}.weight_scale_2"]


@pytest.mark.parametrize("change", [swapped, inverted])
def test_pairs_in_the_other_order_and_an_inverse_factor_are_other_weights(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    """Controls: the comparison above sees both."""
    folder, model, _ = written(tmp_path, "NVFP4")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_sharded(folder, tensors)
    expected = linears(model)[LAYER].weight.detach()
    weight = opened(folder).linear(LAYER, tuple(expected.shape))
    assert isinstance(weight, QuantizedWeight)
    assert signal_to_error(expected, weight.dequantize()) < 3


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_number_above_zero_is_refused(tmp_path: Path, factor: float) -> None:
    folder, model, _ = written(tmp_path, "NVFP4")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_scale_2"] = torch.tensor(factor)
    save_sharded(folder, tensors)
    with pytest.raises(ModelLoadError, match=rf"^{LAYER}\.weight_scale_2 must be a number above 0, got"):
        opened(folder).linear(LAYER, tuple(linears(model)[LAYER].weight.shape))


def test_a_layer_takes_the_algorithm_of_the_nearest_part_that_is_named(tmp_path: Path) -> None:
    folder, model, _ = written(tmp_path, "NVFP4")
    layers = {"model": {"quant_algo": "MXFP8"}, "model.layers.1.mlp": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    form = read_format(ConfigReader({"quantization_config": config}))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    expected = linears(model)[LAYER].weight.detach()
    weight = stored.linear(LAYER, tuple(expected.shape))
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), expected)
    other = "model.layers.0.mlp.up_proj"
    with pytest.raises(ModelLoadError, match=rf"{other}\.weight has shape"):
        stored.linear(other, tuple(expected.shape))


def test_settings_by_layer_may_be_in_the_tools_own_file_alone(tmp_path: Path) -> None:
    folder, model, _ = written(tmp_path, "MIXED_PRECISION")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.1.mlp.down_proj"
    expected = linears(model)[name].weight.detach()
    weight = opened(folder).linear(name, tuple(expected.shape))
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), expected)
    config["quantization_config"]["quantized_layers"] = {"model.layers.1": {"quant_algo": "FP8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json: quantization\.quantized_layers is .*, but"):
        opened(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo must be one of FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size of NVFP4 must be 16, got 32"),
        ({"quant_algo": "NVFP4", "pre_quant_scale": True}, "pre_quant_scale is not supported, got true"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers must name 1 to 65536 layers"),
        ({"quant_algo": "FP8", "quantized_layers": {"a": {"quant_algo": "FP8"}}}, "must be missing unless quant_algo"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "W4A16_AWQ"}}},
            r"quantized_layers\.a\.b\.quant_algo must be one of FP8",
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8", "pre_quant_scale": True}},
            },
            r"quantized_layers\.a\.pre_quant_scale is not supported",
        ),
    ],
)
def test_settings_that_are_not_read_are_refused_by_their_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_format(ConfigReader({"quantization_config": {"quant_method": "modelopt"} | config}))
