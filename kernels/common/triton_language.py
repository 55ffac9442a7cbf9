"""Pieces of kernels that the interpreter and the device compute alike.

The interpreter keeps bfloat16 as raw 16-bit patterns: a product of two is garbage and a cast to it truncates; its casts
to float8 lose a carry into the exponent. Both are mended here behind a constant, so that compiled kernels have nothing
of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton import interpreting

INTERPRET = tl.constexpr(interpreting())
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands go to the tensor cores as three products of TF32 parts."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 to `dtype`, to the nearest and ties to even."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        elif dtype == tl.float8e4nv:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
            small = (x + 24576.0) - 24576.0  # below 2**-6 the steps are 2**-9 wide: 24576 is 1.5 * 2**14
            x = tl.where(tl.abs(x) < 0.015625, small, rounded)
    return x.to(dtype)


@triton.jit
def not_finite(x):
    """True for rows of x with a NaN or infinite value; not for 8-bit types, which have no products."""
    if INTERPRET:
        x = x.to(tl.float32)
    return tl.sum((x * 0.0).to(tl.float32), 1) != 0.0


@triton.jit
def tanh(x):
    """tanh by exponentials: exact at both ends, where they overflow and vanish."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
