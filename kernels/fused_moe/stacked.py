"""All experts of a layer in one tensor per projection, as kernels on a GPU want them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.spec import Swiglu
from troupellm.kernels.quantized_linear import Fp8, QuantizedWeight, Weight
from troupellm.kernels.quantized_linear.footprint import stack_keeps
from troupellm.kernels.quantized_linear.gguf import GgufBlocks, mx_of
from troupellm.kernels.quantized_linear.packed_weights import PackedWeight, packed_weight

Kind = Literal["plain", "fp8", "fp8_blocks", "int8", "mx", "int4"]
"""Eight-bit floats have a scale per output, or one per output and block of inputs."""


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """One projection of all experts."""

    kind: Kind
    values: Tensor
    """[experts, out, in]: the computed type, float8, int8, or for mx and int4 uint8 [experts, out, in / 2], even
    inputs in the low four bits."""
    scales: Tensor | None
    """fp8: float32 [experts, out, 1]; fp8_blocks: float32 [experts, out, in / block]; mx: e8m0 uint8 [experts, out,
    in / 32]; int8 and int4: float32 [experts, out, 2 * in / block], the scales and behind them what is added to a code
    times its scale."""
    block: int
    """Inputs that share a scale."""
    out_features: int
    in_features: int
    label: str = ""
    """The kind of quantized weights and how they are stored here, for the load log."""

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

    They stay what they are where all are alike and there are kernels for it; otherwise they are dequantized.
    """
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    label = f"{quantized[0].kind} experts" if quantized else ""
    kept = _kept(quantized, label) if len(quantized) == len(weights) else None
    if kept is not None:
        return kept
    plain = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    label += ", dequantized at load" if quantized else ""
    out_features, in_features = weights[0].shape
    return StackedWeight("plain", torch.stack(plain), None, in_features, out_features, in_features, label)


def _kept(weights: Sequence[QuantizedWeight], label: str) -> StackedWeight | None:
    """The weights stacked in their codes; None if that is impossible."""
    outlines = {outline for weight in weights for outline in weight.outlines}
    outline = outlines.pop()
    if outlines or not stack_keeps(outline):
        return None
    shape = (outline.group, outline.rows, outline.columns, label)
    fp8 = [weight for weight in weights if isinstance(weight, Fp8)]
    if fp8:
        # as bytes: not every operation knows eight-bit floats
        values = torch.stack([weight.values.view(torch.uint8) for weight in fp8]).view(fp8[0].values.dtype)
        scales = torch.stack([weight.row_scale() for weight in fp8])
        return StackedWeight("fp8" if outline.groups == 1 else "fp8_blocks", values, scales, *shape)
    if outline.code == "mxfp4":
        mx = [mx_of(weight) if isinstance(weight, GgufBlocks) else weight for weight in weights]
        codes, exponents = (torch.stack([getattr(weight, name) for weight in mx]) for name in ("codes", "exponents"))
        return StackedWeight("mx", codes, exponents, *shape)
    found = [codes for codes in map(packed_weight, weights) if codes is not None]
    if len(found) < len(weights):
        return None
    values = torch.stack([codes.codes for codes in found])
    scales = torch.stack([_scales(codes) for codes in found])
    if outline.code == "int8":
        return StackedWeight("int8", values.view(torch.int8), scales, *shape)
    return StackedWeight("int4", values, scales, *shape)


def _scales(codes: PackedWeight) -> Tensor:
    """float32 [out, 2 * groups]: scales, and the offsets of four-bit codes without a base."""
    added = codes.base * codes.scale
    return torch.cat((codes.scale, added if codes.offset is None else added + codes.offset), dim=1)
