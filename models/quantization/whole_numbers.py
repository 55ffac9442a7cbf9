"""Whole numbers of 2 to 8 bits, as the kind of weight that products take."""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Int4Group, Int8WeightOnly, QuantizedWeight
from troupellm.kernels.quantized_linear.outline import Code

FEW = 4
"""Up to so many bits there are two numbers in a byte."""


def whole_code(bits: int) -> Code:
    """The code of what `whole_weight` makes."""
    return "int4" if bits <= FEW else "int8"


def whole_weight(
    values: Tensor,
    scale: Tensor,
    bits: int,
    *,
    zero: Tensor | None,
    group: Tensor | None = None,
    dtype: torch.dtype,
) -> QuantizedWeight:
    """w = (value - zero) * scale of the group.

    Args:
        values: uint8 [out_features, in_features], 0 to 2^bits - 1.
        scale: [out_features, groups].
        zero: like `scale`, or None for the middle, 2^(bits - 1).
        group: the group of each input, or None: equal runs.

    Raises:
        ValueError: shapes do not fit each other.
    """
    middle = 1 << (bits - 1)
    if bits <= FEW:
        if zero is None:
            values = values + (int(Int4Group.middle) - middle)
        return Int4Group.from_values(values, scale, zero=zero, group=group, dtype=dtype)
    codes = (values.to(torch.int16) - middle).to(torch.int8)
    zero = None if zero is None else zero.to(torch.int16) - middle
    return Int8WeightOnly(codes, scale, zero=zero, group=group, dtype=dtype)
