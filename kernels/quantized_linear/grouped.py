"""Whole numbers of few bits with a scale for each group of inputs; inputs keep their type."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight, Unmergeable, require, require_same
from troupellm.kernels.quantized_linear.outline import Code, Outline


class GroupedWeight(QuantizedWeight):
    """w = (q - zero) * scale, with the scale and zero point of the group that an input belongs to.

    Attributes:
        codes: the stored form of `q`; see the kinds.
        scale: any float type [out_features, groups].
        zero: [out_features, groups], or None for the middle of the range of q.
        group: int32 [in_features], which group an input belongs to, or None: equal runs of inputs.
    """

    code: ClassVar[Code]
    middle: ClassVar[float]
    per_byte: ClassVar[int]

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        *,
        zero: Tensor | None = None,
        group: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Raises:
            ValueError: shapes or types do not fit each other.
        """
        require(codes.ndim == 2, "codes must be [out, bytes]")
        rows, columns = codes.shape[0], codes.shape[1] * self.per_byte
        scale = scale[:, None] if scale.ndim == 1 else scale
        require(scale.ndim == 2 and scale.shape[0] == rows, "scale must be [out, groups]")
        require(zero is None or zero.shape == scale.shape, "zero must have the shape of scale")
        if group is None:
            require(columns % scale.shape[1] == 0, f"{scale.shape[1]} groups do not divide {columns} inputs")
        else:
            require(group.shape == (columns,), "group must name one group per input")
            require(int(group.min()) >= 0 and int(group.max()) < scale.shape[1], "group names groups without a scale")
            group = group.to(torch.int32)
        self.codes, self.scale, self.zero, self.group = codes.contiguous(), scale.contiguous(), zero, group
        self.shape, self.dtype = (rows, columns), dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        groups = self.scale.shape[1]
        size = self.shape[1] // groups if self.group is None else int(torch.bincount(self.group.long()).max())
        return (Outline(self.code, *self.shape, size, offsets=self.zero is not None, ordered=self.group is not None),)

    def whole_numbers(self) -> Tensor:
        """q as float32 [out_features, in_features]."""
        return self.codes.float()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        numbers, scale = self.whole_numbers(), self.scale.float()
        zero = None if self.zero is None else self.zero.float()
        if self.group is not None:
            index = self.group.long()
            middle = self.middle if zero is None else zero[:, index]
            return ((numbers - middle) * scale[:, index]).to(dtype or self.dtype)
        grouped = numbers.view(self.shape[0], scale.shape[1], -1)
        weight = (grouped - (self.middle if zero is None else zero[..., None])) * scale[..., None]
        return weight.view(self.shape).to(dtype or self.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts)
        first = parts[0]
        groups = [part.group for part in parts]
        if len({part.scale.shape[1] for part in parts}) > 1 or any(not _equal(first.group, group) for group in groups):
            raise Unmergeable("weights with different groups")
        zeros = [part.zero for part in parts]
        if any(zero is not None for zero in zeros):
            zeros = [torch.full_like(part.scale, cls.middle) if part.zero is None else part.zero for part in parts]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            zero=torch.cat([zero for zero in zeros if zero is not None]) if zeros[0] is not None else None,
            group=first.group,
            dtype=first.dtype,
        )

    def rows(self, index: Tensor | slice) -> Self:
        zero = None if self.zero is None else self.zero[index]
        return type(self)(self.codes[index], self.scale[index], zero=zero, group=self.group, dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.codes, self.scale, self.zero, self.group) if tensor is not None)


class Int8WeightOnly(GroupedWeight):
    """codes: int8 [out_features, in_features], q itself; one scale per row is one group."""

    kind = "int8 weight-only"
    code = "int8"
    middle = 0.0
    per_byte = 1

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round a weight [out, in] to the nearest of -127 to 127, in groups of inputs or whole rows."""
        grouped = weight.float().reshape(weight.shape[0], -1, group_size or weight.shape[1])
        scale = grouped.abs().amax(dim=-1) / 127
        codes = torch.round(grouped / torch.where(scale > 0, scale, 1.0)[..., None]).to(torch.int8)
        return cls(codes.flatten(1), scale, dtype=weight.dtype)


class Int4Group(GroupedWeight):
    """codes: uint8 [out_features, in_features / 2], q of 0 to 15, even inputs in the low four bits; middle 8."""

    kind = "int4"
    code = "int4"
    middle = 8.0
    per_byte = 2

    @classmethod
    def from_values(
        cls,
        values: Tensor,
        scale: Tensor,
        *,
        zero: Tensor | None = None,
        group: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """values: q as whole numbers of 0 to 15, [out_features, in_features], in_features even."""
        require(values.shape[1] % 2 == 0, "in_features must be even")
        pairs = values.to(torch.uint8)
        return cls(pairs[:, ::2] | (pairs[:, 1::2] << 4), scale, zero=zero, group=group, dtype=dtype)

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int) -> Self:
        """Round a weight [out, in], each group of inputs between its smallest and largest number or zero."""
        grouped = weight.float().reshape(weight.shape[0], -1, group_size)
        low, high = grouped.amin(dim=-1).clamp(max=0.0), grouped.amax(dim=-1).clamp(min=0.0)
        scale = (high - low) / 15
        safe = torch.where(scale > 0, scale, 1.0)
        zero = torch.round(-low / safe)
        values = (torch.round(grouped / safe[..., None]) + zero[..., None]).clamp(0, 15)
        return cls.from_values(values.flatten(1), scale, zero=zero.to(torch.uint8), dtype=weight.dtype)

    def whole_numbers(self) -> Tensor:
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(self.shape).float()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
