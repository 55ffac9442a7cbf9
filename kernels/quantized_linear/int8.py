"""Eight bits per weight, one scale per output channel, and inputs in eight bits too."""

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.act_quant.reference import quantize_groups, quantize_rows
from troupellm.kernels.quantized_linear.base import QuantizedWeight, require, require_same
from troupellm.kernels.quantized_linear.outline import Outline

INPUT_GROUP = 128
"""Inputs that share a scale on a CPU."""


class Int8Channel(QuantizedWeight):
    """w = values * scale; inputs are quantized in groups of a token's, and products summed in whole numbers.

    On a CPU a group is `INPUT_GROUP` inputs x, which become round(x / s) with s = max|x| / 127 (ties to even). From the
    first group to the last, total = total + sum(values * round(x / s)) * s, and out = (total * scale) + bias, each step
    rounded to float32. On a GPU all inputs of a row are one group.

    Attributes:
        values: int8 [out_features, in_features].
        scale: float32 [out_features].
    """

    kind = "int8"

    def __init__(self, values: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        require(values.dtype == torch.int8 and values.ndim == 2, "values must be int8 [out, in]")
        require(scale.numel() == values.shape[0], "there must be one scale per row")
        self.values, self.scale = values.contiguous(), scale.reshape(-1).float()
        self.shape, self.dtype = (values.shape[0], values.shape[1]), dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        return (Outline("int8", *self.shape, group=self.shape[1], eight_bit_inputs=True),)

    @classmethod
    def quantize(cls, weight: Tensor) -> Self:
        """Round a weight [out, in] to the nearest; products are computed in its own type."""
        values, scale = quantize_rows(weight)
        return cls(values, scale, dtype=weight.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return (self.values * self.scale[:, None]).to(dtype or self.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts)
        values, scale = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
        return cls(values, scale, dtype=parts[0].dtype)

    def rows(self, index: Tensor | slice) -> Self:
        return type(self)(self.values[index], self.scale[index], dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scale

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.grouped_product(x, bias, INPUT_GROUP if x.device.type == "cpu" else x.shape[1])

    def grouped_product(self, x: Tensor, bias: Tensor | None, group: int) -> Tensor:
        """`product` with `group` inputs for each scale of the inputs."""
        inputs, scale = quantize_groups(x, group)
        pairs = zip(torch.split(inputs.double(), group, 1), torch.split(self.values.double(), group, 1), strict=True)
        # Sums stay below 2**53, so that float64 holds them exactly.
        out = total_of_groups((some @ part.t() for some, part in pairs), scale) * self.scale
        return (out if bias is None else out + bias.float()).to(x.dtype)


def total_of_groups(sums: Iterable[Tensor], scale: Tensor) -> Tensor:
    """Add up exact sums of groups [rows, out], each times its column of `scale` [rows, groups], in order: float32.
    Each addition rounds once, as a fused multiply and add does."""
    total = torch.zeros((), dtype=torch.float32, device=scale.device)
    for number, of_group in enumerate(sums):
        total = fused(of_group.float(), scale[:, number, None], total)
    return total


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once.

    In float64 the product is exact, and the sum is off by `rest` (Knuth's TwoSum). Where it is off, the last bit of the
    sum is made odd on the side of the exact value, so that rounding to float32 rounds that value (Boldo and Melquiond,
    "Emulation of FMA and Correctly Rounded Sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    rest = (product - (total - virtual)) + (addend - virtual)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(rest > 0, torch.inf, -torch.inf).to(total)
    moved = torch.where((rest != 0) & even & total.isfinite(), torch.nextafter(total, toward), total)
    return moved.float()
