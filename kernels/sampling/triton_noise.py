"""The noise of `noise.py` in a kernel: the same integers to the bit, and logarithms within a few last bits.

A device's own logarithm is too coarse near 1, where small exponentials are decided, so both logarithms are series.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
UNIT = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))
GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
MIX_A = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
MIX_B = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def double_atanh(s):
    """log((1 + s) / (1 - s)) for |s| below 0.18."""
    z = s * s
    return 2.0 * s * (1.0 + z * (0.3333333333333333 + z * (0.2 + z * (0.14285714285714285 + z * 0.1111111111111111))))


@triton.jit
def accurate_log(x):
    """log of normal positive float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # the mantissa is put between the roots of 1/2 and of 2
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32) * LN_2 + double_atanh((mantissa - 1.0) / (mantissa + 1.0))


@triton.jit
def xorshift(words, BITS: tl.constexpr):
    return words ^ (words >> BITS)


@triton.jit
def log_exponential(codes, key_low, key_high):
    """As `noise.log_exponential`; codes and the two words of a key are int32."""
    words = codes.to(tl.uint32, bitcast=True) ^ key_low.to(tl.uint32, bitcast=True)
    words = xorshift(words, 17) * 0xED5AD4BB
    words = (xorshift(words, 11) + key_high.to(tl.uint32, bitcast=True)) * 0xAC4C1B51
    words = xorshift(words, 15) * 0x31848BAB
    words = xorshift(words, 14) & 0x7FFFFFFF
    uniform = (words.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * UNIT
    small = double_atanh(uniform / (2.0 - uniform))
    large = -accurate_log(1.0 - tl.where(uniform < 0.25, 0.25, uniform))
    return accurate_log(tl.where(uniform < 0.25, small, large))


@triton.jit
def shifted(word, BITS: tl.constexpr):
    """int64 to the right, as if it had no sign."""
    return (word.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def position_key(stream, position):
    """As `noise.position_keys`, of int64: the two words of a key."""
    key = (stream ^ position) + GAMMA
    key = (key ^ shifted(key, 30)) * MIX_A
    key = (key ^ shifted(key, 27)) * MIX_B
    key = key ^ shifted(key, 31)
    return key.to(tl.int32), shifted(key, 32).to(tl.int32)
