"""AutoRound's packings: files written number by number, as it documents them; equal weights, to the bit, and tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.quantized.float_formats import channels, whole
from troupellm.tests.support.quantized.fp8_blocks import blocks
from troupellm.tests.support.quantized.packed_words import GPTQ, GptqWriter
from troupellm.tests.support.quantized.quantized_llama import (
    Store,
    check_tokens,
    linears,
    load,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)
from troupellm.tests.support.quantized.small_floats import mxfp8, packed_mxfp4, packed_nvfp4

PLAIN = "model.layers.1.self_attn.o_proj"


def config(packing: str, **changes: Any) -> dict[str, Any]:
    """As AutoRound writes it: layers of other settings by name, or by a pattern that stands anywhere in the name."""
    plain = {r"layers\.1\..*o_proj": {"bits": 16, "data_type": "float"}}
    values = {"quant_method": "auto-round", "packing_format": f"auto_round{packing}", "iters": 200, "sym": True}
    return values | {"bits": 4, "group_size": 32, "data_type": "int", "act_bits": 16, "extra_config": plain} | changes


def words(**settings: Any) -> Store:
    return GptqWriter(GPTQ | settings)


def some_eight(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return mxfp8(weight) if name.endswith("down_proj") else packed_mxfp4(weight)


EIGHT = {"bits": 8, "data_type": "fp8", "act_bits": 8, "fmt": "e4m3"}
FORMATS: dict[str, tuple[dict[str, Any], Store]] = {
    "zeros_as_they_are": (config("", sym=False), words(sym=False, checkpoint_format="gptq_v2")),
    "two_bits": (config(":auto_gptq", bits=2), words(bits=2)),
    "three_bits": (config("", bits=3, sym=False), words(bits=3, sym=False, checkpoint_format="gptq_v2")),
    "five_bits": (config(":auto_gptq", bits=5, group_size=-1), words(bits=5, group_size=-1)),
    "seven_bits": (config(":gptqmodel", bits=7), words(bits=7, checkpoint_format="gptq_v2")),
    "fp8_static": (
        config(":fp8_static", **EIGHT, group_size=0, activation_scheme="static"),
        lambda _, w: whole(w, static=True),
    ),
    "fp8_channels": (config(":fp8", **EIGHT, group_size=-1, act_dynamic=True), lambda _, w: channels(w)),
    "fp8_weights": (config(":fp8", **EIGHT | {"act_bits": 16}, group_size=-1), lambda _, w: channels(w)),
    "fp8_blocks": (config(":fp8", **EIGHT, group_size=[48, 40]), lambda _, w: blocks(w, (48, 40))),
    "nvfp4": (
        config(":llm_compressor", group_size=16, data_type="nv_fp", act_bits=4, act_data_type="nv_fp4_with_static_gs"),
        lambda _, w: packed_nvfp4(w),
    ),
    "mxfp4_and_mxfp8": (
        config(
            ":llm_compressor",
            data_type="mx_fp",
            act_bits=4,
            extra_config={
                PLAIN: {"bits": 16},
                r".*mlp.*down_proj.*": {"bits": 8, "act_bits": 8},
            },
        ),
        some_eight,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_tokens_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    model, (settings, store) = tiny_llama(), FORMATS[name]
    folder = write_model(tmp_path, model, store, settings, plain=("lm_head", PLAIN))
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    for layer, module in linears(model).items():
        weight = take_outlined(stored, layer, tuple(module.weight.shape))
        assert isinstance(weight, QuantizedWeight) == (layer not in ("lm_head", PLAIN))
        if isinstance(weight, QuantizedWeight):
            eight = settings["bits"] == 8 and settings["act_bits"] == 8
            assert weight.outlines[0].eight_bit_inputs == eight
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(values, module.weight.detach())
    worker, seen = load(folder)
    check_tokens(model, tokens_of(worker))
    calibrated = any("calibrated input scales" in progress.detail for progress in seen)
    assert calibrated == (name in ("fp8_static", "nvfp4", "mxfp4_and_mxfp8"))
    worker.close()


def test_zero_points_one_too_low_are_other_weights(tmp_path: Path) -> None:
    """Control: both packings differ in nothing else."""
    model = tiny_llama()
    folder = write_model(tmp_path, model, words(sym=False), config("", sym=False, extra_config={}))
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    expected = linears(model)[PLAIN].weight.detach()
    weight = stored.linear(PLAIN, tuple(expected.shape))
    assert isinstance(weight, QuantizedWeight)
    assert not torch.allclose(weight.dequantize(), expected, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(":mlx"), 'packing_format must be one of .* got "auto_round:mlx"'),
        (config(":fp8", bits=4, data_type="fp8"), "bits must be one of 8, or 16, got 4"),
        (config(":fp8"), 'data_type must be one of fp, fp8, fp8_e4m3, got "int"'),
        (config(":fp8", **EIGHT | {"fmt": "e5m2"}), 'fmt must be one of e4m3.* got "e5m2"'),
        (config(":llm_compressor", data_type="nv_fp"), "group_size of nv_fp must be 16, got 32"),
        (config(":llm_compressor", data_type="nvfp4_v2"), 'data_type must be one of mx_fp.* got "nvfp4_v2"'),
        (config(":llm_compressor", data_type="mx_fp", bits=6), "bits must be one of 4, 8, or 16, got 6"),
        (config("", group_size=0), "group_size must be -1 or at least 1, got 0"),
        (
            config(":auto_awq", extra_config={"a.b": {"bits": 8}}),
            r"extra_config\.a\.b must be of 16 bits with the packing auto_round:auto_awq",
        ),
        (config("", extra_config={"(a+)+b": {"bits": 8}}), r"extra_config.*: the pattern .* could take too long"),
        (config("", extra_config={"a": {"bits": 4, "codebook": 1}}), r"extra_config\.a\.codebook is not supported"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_their_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_format(ConfigReader({"quantization_config": settings}))
