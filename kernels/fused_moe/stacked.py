"""All experts of a layer in one tensor per projection, as kernels on a GPU want them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.spec import Swiglu
from troupellm.kernels.quantized import Fp8, Mx, QuantizedWeight, Weight

Kind = Literal["plain", "fp8", "fp8_blocks", "mx"]
"""Eight-bit floats have a scale per output, or one per output and block of inputs."""
MX_BLOCK = 32
FP8_BLOCK = 128
"""Blocks of inputs with a scale are multiples of it: the largest tile of a product, which has one scale per output."""


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The same projection of all experts."""

    kind: Kind
    values: Tensor
    """[experts, out, in]: the computed type, float8, or for mx uint8 [experts, out, in / 2], even inputs in the low
    four bits."""
    scales: Tensor | None
    """fp8: float32 [experts, out, 1]; fp8_blocks: float32 [experts, out, in / block]; mx: e8m0 uint8 [experts, out,
    in / 32]."""
    block: int
    """Inputs that share a scale."""
    out_features: int
    in_features: int

    @property
    def experts(self) -> int:
        return self.values.shape[0]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Both projections of all experts; gate_up has the rows of the gate first."""

    gate_up: StackedWeight
    down: StackedWeight
    gate_up_bias: Tensor | None
    """[experts, 2 * size]."""
    down_bias: Tensor | None
    """[experts, hidden]."""
    swiglu: Swiglu


def stack(weights: Sequence[Weight]) -> StackedWeight:
    """Experts' weights [out, in], of the same shape, as one.

    Eight-bit floats and MXFP4 stay what they are where all are alike; any other kind is dequantized.
    """
    out_features, in_features = weights[0].shape
    fp8 = [weight for weight in weights if isinstance(weight, Fp8) and _fits(weight)]
    if len(fp8) == len(weights) and len({(weight.values.dtype, weight.block[1]) for weight in fp8}) == 1:
        # as bytes: not every operation knows eight-bit floats
        values = torch.stack([weight.values.view(torch.uint8) for weight in fp8]).view(fp8[0].values.dtype)
        scales = torch.stack([weight.row_scale() for weight in fp8])
        kind: Kind = "fp8" if scales.shape[2] == 1 else "fp8_blocks"
        return StackedWeight(kind, values, scales, min(fp8[0].block[1], in_features), out_features, in_features)
    mx = [weight for weight in weights if isinstance(weight, Mx) and weight.element == "fp4_e2m1"]
    if len(mx) == len(weights) and in_features % MX_BLOCK == 0:
        codes, exponents = (torch.stack([getattr(weight, name) for weight in mx]) for name in ("codes", "exponents"))
        return StackedWeight("mx", codes, exponents, MX_BLOCK, out_features, in_features)
    plain = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    return StackedWeight("plain", torch.stack(plain), None, in_features, out_features, in_features)


def _fits(weight: Fp8) -> bool:
    return weight.block[1] >= weight.shape[1] or weight.block[1] % FP8_BLOCK == 0
