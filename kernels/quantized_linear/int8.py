"""Eight bits per weight, one scale per output channel, and inputs in eight bits too."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.act_quant.reference import quantize_rows
from troupellm.kernels.quantized_linear.base import QuantizedWeight, require, require_same
from troupellm.kernels.quantized_linear.outline import Outline


class Int8Channel(QuantizedWeight):
    """w = values * scale; inputs are quantized per token, and products summed in whole numbers.

    An input row x becomes round(x / s) with s = max|x| / 127 (ties to even), and
    out = ((sum(values * round(x / s)) * scale) * s) + bias, each step rounded to float32.

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
        inputs, scale = quantize_rows(x)
        # Sums stay below 2**53, so that float64 holds them exactly.
        sums = inputs.double() @ self.values.double().t()
        out = sums.float() * self.scale * scale[:, None]
        return (out if bias is None else out + bias.float()).to(x.dtype)
