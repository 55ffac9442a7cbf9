"""All kinds of weights whose inputs keep their type, as codes that products decode on the fly.

A weight is decoded(code) * scale + offset, where a code is eight or four bits and scale and offset belong to an output
and a group of inputs. That is exact: every code stands for the very number that the kind's own definition gives it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight
from troupellm.kernels.quantized_linear.fp8 import Fp8
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.quantized_linear.grouped import GroupedWeight, Int4Group
from troupellm.kernels.quantized_linear.int8 import Int8Channel
from troupellm.kernels.quantized_linear.mx import Mx, element_values, powers_of_two
from troupellm.kernels.quantized_linear.table4 import Table4

UNIT = 16
"""Outputs that lie side by side."""
Kind = Literal["int8", "table", "fp8"]


@dataclass(frozen=True)
class PackedWeight:
    """One weight.

    Attributes:
        codes: uint8 [out_features, in_features], or [out_features, in_features / 2] of four bits with the even input
            in the low half.
        kind: of a code: a signed byte, a place in `table`, or e4m3.
        scale: float32 [out_features, groups].
        offset: like `scale`, or None.
        table: int8 [16], for four bits; always on the host.
        order: int64 [in_features], the order in which inputs are multiplied; None is unchanged.
    """

    codes: Tensor
    kind: Kind
    scale: Tensor
    offset: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None

    @cached_property
    def base(self) -> int:
        """The number to add to a code of four bits if the table's numbers are consecutive."""
        return 0 if self.table is None else int(self.table[0])


def packed_weight(weight: QuantizedWeight) -> PackedWeight | None:
    """The weight as codes; None where it cannot be."""
    found: PackedWeight | None = None
    if not all(outline.decodable for outline in weight.outlines):
        return None
    if isinstance(weight, GroupedWeight):
        found = _grouped(weight)
    elif isinstance(weight, Int8Channel):
        found = PackedWeight(weight.values.view(torch.uint8), "int8", weight.scale[:, None])
    elif isinstance(weight, Fp8):
        found = PackedWeight(weight.values.view(torch.uint8), "fp8", weight.row_scale().contiguous())
    elif isinstance(weight, Mx):
        found = _mx(weight)
    elif isinstance(weight, Table4):
        found = PackedWeight(weight.codes, "table", weight.scale / 2, table=weight.doubled)
    elif isinstance(weight, GgufBlocks):
        found = _gguf(weight)
    numbers = found is None or found.kind != "fp8" or not bool(((found.codes & 0x7F) == 0x7F).any())
    return found if numbers else None  # NaN is not decoded


def _grouped(weight: GroupedWeight) -> PackedWeight | None:
    scale = weight.scale.float()
    zero = None if weight.zero is None else weight.zero.float()
    four = isinstance(weight, Int4Group)
    numbers = torch.arange(UNIT, dtype=torch.int8) - (int(weight.middle) if zero is None else 0)
    offset = None if zero is None else -zero * scale
    result = PackedWeight(
        weight.codes.view(torch.uint8), "table" if four else "int8", scale, offset, table=numbers if four else None
    )
    if weight.group is None:
        return result
    order = torch.argsort(weight.group, stable=True)
    sizes = torch.bincount(weight.group.long(), minlength=scale.shape[1])
    if len(set(sizes.tolist())) > 1:
        return None
    codes = weight.whole_numbers().to(torch.int16).to(torch.uint8)[:, order]
    return replace(result, codes=_halves(codes) if four else codes, order=order)


def _mx(weight: Mx) -> PackedWeight:
    scale = powers_of_two(weight.exponents)
    if weight.element == "fp4_e2m1":  # multiples of a half
        return PackedWeight(weight.codes, "table", scale / 2, table=(element_values("fp4_e2m1") * 2).to(torch.int8))
    if weight.element == "fp8_e4m3":
        return PackedWeight(weight.codes, "fp8", scale)
    # Six bits are less than the eight of e4m3 in range and precision.
    values = element_values(weight.element, weight.codes.device).to(torch.float8_e4m3fn).view(torch.uint8)
    return PackedWeight(values[weight.codes.long()], "fp8", scale)


def _gguf(weight: GgufBlocks) -> PackedWeight:
    """The codes are put together slab by slab, so that little memory is needed beside them."""
    (outline,), rows = weight.outlines, weight.shape[0]
    eight, device = outline.code == "int8", weight.data.device
    codes = torch.empty(rows, weight.shape[1] // (1 if eight else 2), dtype=torch.uint8, device=device)
    scale = torch.empty(rows, outline.groups, dtype=torch.float32, device=device)
    offset = torch.empty_like(scale) if outline.offsets else None
    table: tuple[int, ...] | None = None
    for place, fields in weight.slabs():
        codes[place] = fields.codes.view(torch.uint8) if eight else _halves(fields.codes)
        scale[place], table = fields.scale, fields.table
        if offset is not None and fields.offset is not None:
            offset[place] = fields.offset
    numbers = None if table is None else torch.tensor(table, dtype=torch.int8)
    return PackedWeight(codes, "int8" if eight else "table", scale, offset, numbers)


def _halves(numbers: Tensor) -> Tensor:
    """uint8 [out, in] of 0 to 15, two to a byte."""
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)
