"""Codes of four bits that stand for sixteen numbers of any kind, with a scale for each run of inputs."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight, Unmergeable, require, require_same
from troupellm.kernels.quantized_linear.outline import Code, Outline

PLACES = 16


class Table4(QuantizedWeight):
    """w = table[code] * scale of the run of inputs that a weight lies in; inputs keep their type.

    Attributes:
        codes: uint8 [out_features, in_features / 2], even inputs in the low four bits.
        table: float32 [16].
        scale: float32 [out_features, runs]; runs are equally long.
    """

    kind = "table4"

    def __init__(self, codes: Tensor, table: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        """
        Raises:
            ValueError: shapes or types do not fit each other.
        """
        require(codes.ndim == 2 and codes.dtype == torch.uint8, "codes must be uint8 [out, bytes]")
        require(table.shape == (PLACES,), f"the table must have {PLACES} numbers")
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        require(scale.ndim == 2 and scale.shape[0] == rows, "scale must be [out, runs]")
        require(columns % scale.shape[1] == 0, f"{scale.shape[1]} runs do not divide {columns} inputs")
        self.codes, self.table, self.scale = codes.contiguous(), table.float(), scale.float().contiguous()
        self.shape, self.dtype = (rows, columns), dtype

    @property
    def doubled(self) -> Tensor | None:
        """Twice the table as int8 [16], which products in codes take; None where it has other numbers than halves."""
        twice = self.table * 2
        return twice.to(torch.int8) if bool((twice.round() == twice).all() and twice.abs().max() < 128) else None

    @property
    def outlines(self) -> tuple[Outline, ...]:
        code: Code = "float4" if self.doubled is None else "table4"
        return (Outline(code, *self.shape, self.shape[1] // self.scale.shape[1]),)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        places = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(self.shape[0], self.scale.shape[1], -1)
        return (self.table[places.int()] * self.scale[..., None]).view(self.shape).to(dtype or self.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts)
        first = parts[0]
        if any(part.scale.shape[1] != first.scale.shape[1] for part in parts):
            raise Unmergeable("weights with different runs")
        if any(part.table is not first.table and not torch.equal(part.table, first.table) for part in parts):
            raise Unmergeable("weights with different tables")
        codes, scale = torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts])
        return cls(codes, first.table, scale, dtype=first.dtype)

    def rows(self, index: Tensor | slice) -> Self:
        return type(self)(self.codes[index], self.table, self.scale[index], dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.table, self.scale
