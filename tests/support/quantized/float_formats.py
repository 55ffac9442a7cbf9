"""Weights as fp8 and Quark checkpoints store them, written number by number, as the formats are documented."""

from typing import Any

import torch
from torch import Tensor

from troupellm.tests.support.quantized.fp8_blocks import E4M3, LARGEST, blocks
from troupellm.tests.support.quantized.quantized_llama import Store

BLOCK = (48, 40)
"""Divides none of the shapes."""


def whole(weight: Tensor, *, static: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / LARGEST
    values = (weight / scale).to(E4M3)
    stored = {"weight": values, "weight_scale": scale} | ({"input_scale": torch.tensor(0.5)} if static else {})
    return stored, values.float() * scale


def channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(dim=1) / LARGEST
    values = (weight / scale[:, None]).to(E4M3)
    return {"weight": values, "weight_scale": scale}, values.float() * scale[:, None]


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(dim=1) / 127
    values = torch.round(weight / scale[:, None]).to(torch.int8)
    zeros = torch.zeros_like(scale).to(torch.int8)
    return {"weight": values, "weight_scale": scale, "weight_zero_point": zeros}, values.float() * scale[:, None]


def element(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A small float by the OCP MX specification."""
    mantissa, rest = code % (1 << mantissa_bits), code >> mantissa_bits
    exponent, sign = rest % (1 << exponent_bits), rest >> exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    size = (
        2.0 ** (exponent - bias) * (1 + mantissa / (1 << mantissa_bits))
        if exponent
        else 2.0 ** (1 - bias) * mantissa / (1 << mantissa_bits)
    )
    return -size if sign else size


def microscaling(weight: Tensor, bits: int, exponent_bits: int, mantissa_bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Codes as one long little-endian number, and a power of two for 32 inputs."""
    table = torch.tensor([element(code, exponent_bits, mantissa_bits) for code in range(1 << bits)])
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(dim=-1) / table.max())).to(torch.int64)
    scale = torch.exp2(exponents.float())[..., None]
    codes = (groups[..., None] / scale[..., None] - table).abs().argmin(dim=-1)
    meant = (table[codes] * scale).view_as(weight)
    rows = []
    for row in codes.flatten(1).tolist():
        number = sum(code << (bits * index) for index, code in enumerate(row))
        rows.append(list(number.to_bytes(len(row) * bits // 8, "little")))
    packed = torch.tensor(rows, dtype=torch.uint8)
    return {"weight": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def fp8_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]} | changes


FP8_SCHEME = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": None, "ch_axis": None}
INT8_SCHEME = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": False, "symmetric": True, "ch_axis": 0}


def mx_scheme(dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
        "is_dynamic": False,
        "ch_axis": -1,
    }


def layer_config(weight: dict[str, Any] | None, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}


def quark_config(layer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": layer,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
    } | changes


def mixed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Another format for some layers each, and none for one."""
    if name == "model.layers.1.mlp.up_proj":
        return {"weight": weight}, weight
    if name.endswith("down_proj"):
        return channels(weight)
    return microscaling(weight, 6, 3, 2) if ".self_attn." in name else microscaling(weight, 4, 2, 1)


MIXED = quark_config(
    layer_config(mx_scheme("fp4")),
    layer_quant_config={
        "*down_proj": layer_config(FP8_SCHEME | {"qscheme": "per_channel", "ch_axis": 0}),
        "re:model\\.layers\\.\\d\\.self_attn": layer_config(mx_scheme("fp6_e3m2")),
        "model.layers.1.mlp.up_proj": layer_config(None),
    },
)
EIGHT_BIT_INPUTS = INT8_SCHEME | {"is_dynamic": True, "ch_axis": 1}
FORMATS: dict[str, tuple[dict[str, Any], Store, float]] = {
    "fp8_tensor": (fp8_config(), lambda _, w: whole(w), 28),
    "fp8_static": (fp8_config(activation_scheme="static"), lambda _, w: whole(w, static=True), 28),
    "fp8_channel": (fp8_config(), lambda _, w: channels(w), 28),
    "fp8_block": (fp8_config(weight_block_size=list(BLOCK)), lambda _, w: blocks(w, BLOCK), 28),
    "fp8_block_powers": (
        fp8_config(weight_block_size=list(BLOCK), scale_fmt="ue8m0"),
        lambda _, w: blocks(w, BLOCK, powers=True),
        28,
    ),
    "quark_fp8": (quark_config(layer_config(FP8_SCHEME)), lambda _, w: whole(w), 28),
    "quark_fp8_inputs": (
        quark_config(layer_config(FP8_SCHEME, FP8_SCHEME | {"is_dynamic": True})),
        lambda _, w: whole(w),
        28,
    ),
    "quark_int8": (quark_config(layer_config(INT8_SCHEME, EIGHT_BIT_INPUTS)), lambda _, w: int8(w), 38),
    "quark_int8_weights": (quark_config(layer_config(INT8_SCHEME)), lambda _, w: int8(w), 38),
    "quark_mxfp4": (quark_config(layer_config(mx_scheme("fp4"))), lambda _, w: microscaling(w, 4, 2, 1), 14),
    "quark_mxfp6_e3m2": (quark_config(layer_config(mx_scheme("fp6_e3m2"))), lambda _, w: microscaling(w, 6, 3, 2), 20),
    "quark_mxfp6_e2m3": (quark_config(layer_config(mx_scheme("fp6_e2m3"))), lambda _, w: microscaling(w, 6, 2, 3), 25),
    "quark_mixed": (MIXED, mixed, 14),
}
