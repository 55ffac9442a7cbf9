"""Weights in small floats, written number by number as the formats are documented: ModelOpt's and AutoRound's names."""

import torch
from torch import Tensor

from troupellm.tests.support.quantized.float_formats import channels, element, microscaling, whole
from troupellm.tests.support.quantized.fp8_blocks import blocks
from troupellm.tests.support.quantized.quantized_llama import Store, Stored

GROUP = 16
E2M1 = torch.tensor([element(code, 2, 1) for code in range(16)])


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in] and e4m3 scales [out, in / 16] of a weight, and the factor of the scales."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    factor = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(dim=-1) / 6 / factor).to(torch.float8_e4m3fn)
    steps = (scale.float() * factor)[..., None, None]
    codes = (groups[..., None] / steps - E2M1).abs().argmin(dim=-1)
    return codes.view(weight.shape).to(torch.uint8), scale, factor


def pairs(codes: Tensor) -> Tensor:
    """Even inputs in the low four bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def modelopt_nvfp4(weight: Tensor, *, static: bool = True) -> Stored:
    codes, scale, factor = nvfp4(weight)
    meant = E2M1[codes.int()] * (scale.float() * factor).repeat_interleave(GROUP, dim=1)
    stored = {"weight": pairs(codes), "weight_scale": scale, "weight_scale_2": factor}
    return stored | ({"input_scale": torch.tensor(0.01)} if static else {}), meant


def packed_nvfp4(weight: Tensor) -> Stored:
    """With compressed-tensors' names: scales are divided by the factor."""
    codes, scale, factor = nvfp4(weight)
    divisor = (1 / factor).reshape(1)
    meant = E2M1[codes.int()] * (scale.float() / divisor).repeat_interleave(GROUP, dim=1)
    stored = {"weight_packed": pairs(codes), "weight_scale": scale, "weight_global_scale": divisor}
    return stored | {"input_global_scale": torch.tensor([100.0])}, meant


def packed_mxfp4(weight: Tensor) -> Stored:
    stored, meant = microscaling(weight, 4, 2, 1)
    return {"weight_packed": stored["weight"], "weight_scale": stored["weight_scale"]}, meant


def mxfp8(weight: Tensor) -> Stored:
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(dim=-1) / 448))
    values = (groups / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn)
    meant = (values.float() * torch.exp2(exponents)[..., None]).view_as(weight)
    return {"weight": values.view_as(weight), "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def fp8_blocks(weight: Tensor) -> Stored:
    """ModelOpt's scales of blocks have four dimensions."""
    stored, meant = blocks(weight, (128, 128))
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"][:, None, :, None]}, meant


LAYERS = {"down_proj": ("NVFP4", modelopt_nvfp4), "o_proj": ("MXFP8", mxfp8), "q_proj": ("FP8", whole)}
"""Of a checkpoint with several formats; the other layers are plain."""


def mixed(name: str, weight: Tensor) -> Stored:
    kind = LAYERS.get(name.rpartition(".")[2])
    return ({"weight": weight}, weight) if kind is None else kind[1](weight)


MODELOPT: dict[str, tuple[Store, float]] = {
    "FP8": (lambda _, weight: whole(weight, static=True), 28),
    "FP8_PER_CHANNEL_PER_TOKEN": (lambda _, weight: channels(weight), 28),
    "FP8_PB_WO": (lambda _, weight: fp8_blocks(weight), 28),
    "NVFP4": (lambda _, weight: modelopt_nvfp4(weight), 18),
    "W4A16_NVFP4": (lambda _, weight: modelopt_nvfp4(weight, static=False), 18),
    "MXFP8": (lambda _, weight: mxfp8(weight), 26),
    "MIXED_PRECISION": (mixed, 18),
}
"""By `quant_algo`: the stored form, and the fewest decibels of signal to error."""
