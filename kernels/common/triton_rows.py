"""Pieces of kernels that put rows of numbers into eight bits, each row with a scale of its own."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import cast

FP8_LARGEST = tl.constexpr(448.0)
INT8_LARGEST = tl.constexpr(127.0)


@triton.jit
def nearest(x):
    """The nearest whole number of one below 2**22, ties to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: what is added to it loses its fraction


@triton.jit
def clamped(x):
    """Limited to the range of e4m3; NaN stays NaN."""
    return tl.where(x > FP8_LARGEST, FP8_LARGEST, tl.where(x < -FP8_LARGEST, -FP8_LARGEST, x))


@triton.jit
def largest(x):
    """The largest magnitude of each row of [rows, columns], float32; NaN where there is one."""
    some_nan = tl.max((x != x).to(tl.int32), 1)
    return tl.where(some_nan > 0, float("nan"), tl.max(tl.abs(x), 1))


@triton.jit
def row_scale(magnitude, dtype: tl.constexpr):
    """The divisor of a row with this largest magnitude."""
    if dtype == tl.int8:
        return tl.div_rn(magnitude, INT8_LARGEST)
    else:
        return tl.div_rn(magnitude, FP8_LARGEST)


@triton.jit
def quantized(x, scale, dtype: tl.constexpr):
    """float32 [rows, columns] over the scale of its row, to the nearest of `dtype`, int8 or float8_e4m3fn."""
    wide = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(x))
    if dtype == tl.int8:
        return tl.where(wide == wide, nearest(wide), 0.0).to(tl.int8)
    else:
        return cast(clamped(wide), dtype)
