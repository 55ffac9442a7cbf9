"""Eight-bit floating point with scales for blocks of any size: the whole weight, its rows, or tiles."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.act_quant.reference import LARGEST_E4M3
from troupellm.kernels.quantized_linear.base import QuantizedWeight, Unmergeable, require, require_same
from troupellm.kernels.quantized_linear.outline import Code, Outline

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Fp8(QuantizedWeight):
    """w = values * scale of the block that a weight lies in; inputs keep their type, or may be put into e4m3.

    Attributes:
        values: float8_e4m3fn or float8_e5m2 [out_features, in_features].
        scale: float32 [ceil(out_features / block[0]), ceil(in_features / block[1])].
        block: rows and columns that share a scale.
        eight_bit_inputs: whether inputs are to be in eight bits, too: a GPU then puts them into e4m3 by row where the
            weight is e4m3 with one scale for each of its rows, which is as exact as the weight and what its tensor
            cores are fast at. Everywhere else they keep their type, which is closer still.
    """

    kind = "fp8"

    def __init__(
        self,
        values: Tensor,
        scale: Tensor,
        *,
        block: tuple[int, int] | None = None,
        eight_bit_inputs: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            scale: one number for all, one per row, or one per block.
            block: needed with the last of these alone.

        Raises:
            ValueError: shapes or types do not fit each other.
        """
        require(values.dtype in TYPES and values.ndim == 2, "values must be eight-bit floats [out, in]")
        rows, columns = values.shape
        if block is None:
            require(scale.numel() in (1, rows), "without blocks there must be one scale, or one per row")
            block = (1, columns) if scale.numel() == rows else (rows, columns)
        wanted = (-(-rows // block[0]), -(-columns // block[1]))
        require(scale.numel() == wanted[0] * wanted[1], f"scale must be {list(wanted)}")
        self.values, self.scale, self.block = values.contiguous(), scale.reshape(wanted).float(), block
        self.shape, self.dtype, self.eight_bit_inputs = (rows, columns), dtype, eight_bit_inputs

    @classmethod
    def quantize(cls, weight: Tensor) -> Self:
        """Round a weight [out, in] to the nearest in e4m3, each row scaled to the whole range."""
        scale = weight.float().abs().amax(dim=1) / LARGEST_E4M3
        values = weight.float() / torch.where(scale > 0, scale, 1.0)[:, None]
        return cls(values.to(torch.float8_e4m3fn), scale, eight_bit_inputs=True, dtype=weight.dtype)

    @property
    def outlines(self) -> tuple[Outline, ...]:
        code: Code = "fp8" if self.values.dtype == torch.float8_e4m3fn else "fp8_e5m2"
        group = min(self.block[1], self.shape[1])
        return (Outline(code, *self.shape, group, eight_bit_inputs=self.eight_bit_inputs),)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        scale = self.row_scale()
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]]
        return (self.values.float() * scale).to(dtype or self.dtype)

    def row_scale(self) -> Tensor:
        """The scales of each row, float32 [out_features, blocks along the inputs]."""
        return self.scale.repeat_interleave(self.block[0], dim=0)[: self.shape[0]]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts)
        widths = {min(part.block[1], part.shape[1]) for part in parts}
        if len(widths) > 1 or len({part.values.dtype for part in parts}) > 1:
            raise Unmergeable("weights with different blocks or types")
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
        scale = torch.cat([part.row_scale() for part in parts])
        eight = all(part.eight_bit_inputs for part in parts)
        return cls(values, scale, block=(1, widths.pop()), eight_bit_inputs=eight, dtype=parts[0].dtype)

    def rows(self, index: Tensor | slice) -> Self:
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        scale, block = self.row_scale()[index], (1, self.block[1])
        return type(self)(values, scale, block=block, eight_bit_inputs=self.eight_bit_inputs, dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scale
