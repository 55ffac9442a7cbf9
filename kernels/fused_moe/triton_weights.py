"""Tiles of experts' weights, plain or quantized, in the middle of a product.

A tile of four-bit codes is a tile of bytes: its low halves meet the even inputs and its high halves the odd ones, so
nothing is interleaved in registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import cast, dot, tanh

KINDS = {"plain": 0, "fp8": 1, "fp8_blocks": 2, "int8": 3, "mx": 4, "int4": 5}
PLAIN, FP8_ROWS, FP8_BLOCKS, INT8, MX, INT4 = (tl.constexpr(kind) for kind in KINDS.values())
GATE_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}
GELU, CLAMPED = tl.constexpr(GATE_KINDS["gelu_tanh"]), tl.constexpr(GATE_KINDS["clamped"])
FOUR_BITS = MX
"""In this kind and the later ones, a byte holds two weights."""


@triton.jit
def e2m1(codes):
    """The numbers of four-bit codes, float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negated."""
    magnitude = (codes & 7).to(tl.int32)
    normal = ((((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where((codes & 8) != 0, -value, value)


@triton.jit
def power_of_two(exponents):
    """2 ** (exponent - 127), float32, of e8m0 scales; 255 is not a number."""
    bits = exponents.to(tl.int32) << 23
    bits = tl.where(exponents == 0, 1 << 22, bits)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(scales, at, k, place, there, groups, BLOCK_K: tl.constexpr, SCALE_K: tl.constexpr):
    """Scales and offsets of integer codes: value = code * scale + offset. Offsets begin `groups` behind the scales.

    Args:
        at: where the scales of an output begin; place: inputs of a tile from `k` on.
    """
    if SCALE_K % BLOCK_K == 0:  # one of each for the tile
        first = scales + at + k // SCALE_K
        return tl.load(first), tl.load(first + groups)
    else:
        first = scales + at + place // SCALE_K
        return tl.load(first, there, 0.0), tl.load(first + groups, there, 0.0)


@triton.jit
def load_inputs(rows, valid, k, in_features, KIND: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of inputs [rows, BLOCK_K], twice; for four bits the even and the odd ones, [rows, BLOCK_K / 2] each."""
    if KIND >= FOUR_BITS:
        place = k + 2 * tl.arange(0, BLOCK_K // 2)
        kept = valid[:, None] if WHOLE else valid[:, None] & (place < in_features)[None, :]
        even = tl.load(rows[:, None] + place[None, :], kept, 0.0)
        return even, tl.load(rows[:, None] + place[None, :] + 1, kept, 0.0)
    else:  # the compiler would give code behind an early return another type
        place = k + tl.arange(0, BLOCK_K)
        kept = valid[:, None] if WHOLE else valid[:, None] & (place < in_features)[None, :]
        tile = tl.load(rows[:, None] + place[None, :], kept, 0.0)
        return tile, tile


@triton.jit
def add_product(
    acc,
    even,
    odd,
    weights,
    scales,
    at,
    scale_at,
    k,
    in_features,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """acc + inputs @ weights.T over the inputs from `k`; of FP8_ROWS the caller applies the scales at the end.

    Args:
        acc: float32 [rows, BLOCK_N].
        even, odd: from `load_inputs`.
        at, scale_at: int64 [BLOCK_N], where the rows of weights and of scales begin.
        SCALE_K: inputs that share a scale; of FP8_BLOCKS a multiple of BLOCK_K.
        WHOLE: the inputs are a multiple of BLOCK_K.
    """
    groups = in_features // SCALE_K
    if KIND >= FOUR_BITS:
        place = k // 2 + tl.arange(0, BLOCK_K // 2)
        there = place < in_features // 2
        codes = tl.load(weights + at[None, :] + place[:, None], None if WHOLE else there[:, None], None if WHOLE else 0)
        if KIND == MX:
            exponents = tl.load(scales + scale_at[None, :] + (place // 16)[:, None], there[:, None], 127)
            scale = power_of_two(exponents)
            low, high = e2m1(codes & 15) * scale, e2m1(codes >> 4) * scale
        else:
            scale, offset = scales_of(
                scales, scale_at[None, :], k, 2 * place[:, None], there[:, None], groups, BLOCK_K, SCALE_K
            )
            low, high = (codes & 15).to(tl.float32) * scale + offset, (codes >> 4).to(tl.float32) * scale + offset
        acc = dot(even, cast(low, even.dtype), acc)
        acc = dot(odd, cast(high, even.dtype), acc)
    elif KIND == INT8:
        place = k + tl.arange(0, BLOCK_K)
        there = (place < in_features)[:, None]
        codes = tl.load(weights + at[None, :] + place[:, None], None if WHOLE else there, None if WHOLE else 0)
        scale, offset = scales_of(scales, scale_at[None, :], k, place[:, None], there, groups, BLOCK_K, SCALE_K)
        acc = dot(even, cast(codes.to(tl.float32) * scale + offset, even.dtype), acc)
    else:
        place = k + tl.arange(0, BLOCK_K)
        there = place < in_features
        tile = tl.load(
            weights + at[None, :] + place[:, None], None if WHOLE else there[:, None], None if WHOLE else 0.0
        )
        if KIND == FP8_BLOCKS:
            scale = tl.load(scales + scale_at + k // SCALE_K)
            acc += dot(even, tile.to(even.dtype), tl.zeros_like(acc)) * scale[None, :]
        else:
            acc = dot(even, tile.to(even.dtype), acc)
    return acc


@triton.jit
def add_row_product(
    acc,
    row,
    weights,
    scales,
    at,
    scale_at,
    k,
    in_features,
    factor,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_K: tl.constexpr,
):
    """acc + factor * inputs * weights, for one row of inputs; the caller adds up the last dimension at the end.

    Args:
        acc: float32 [BLOCK_N, BLOCK_K], of four bits [BLOCK_N, BLOCK_K / 2].
        row: pointer to the row's first input.
    """
    groups = in_features // SCALE_K
    if KIND >= FOUR_BITS:
        place = k // 2 + tl.arange(0, BLOCK_K // 2)
        there = place < in_features // 2
        even = tl.load(row + 2 * place, there, 0.0).to(tl.float32) * factor
        odd = tl.load(row + 2 * place + 1, there, 0.0).to(tl.float32) * factor
        codes = tl.load(weights + at[:, None] + place[None, :], there[None, :], 0)
        if KIND == MX:
            exponents = tl.load(scales + scale_at[:, None] + (place // 16)[None, :], there[None, :], 127)
            acc += (e2m1(codes & 15) * even[None, :] + e2m1(codes >> 4) * odd[None, :]) * power_of_two(exponents)
        else:
            scale, offset = scales_of(
                scales, scale_at[:, None], k, 2 * place[None, :], there[None, :], groups, BLOCK_K, SCALE_K
            )
            low, high = (codes & 15).to(tl.float32) * scale + offset, (codes >> 4).to(tl.float32) * scale + offset
            acc += low * even[None, :] + high * odd[None, :]
    elif KIND == INT8:
        place = k + tl.arange(0, BLOCK_K)
        there = place < in_features
        inputs = tl.load(row + place, there, 0.0).to(tl.float32) * factor
        codes = tl.load(weights + at[:, None] + place[None, :], there[None, :], 0)
        scale, offset = scales_of(
            scales, scale_at[:, None], k, place[None, :], there[None, :], groups, BLOCK_K, SCALE_K
        )
        acc += (codes.to(tl.float32) * scale + offset) * inputs[None, :]
    else:
        place = k + tl.arange(0, BLOCK_K)
        there = place < in_features
        inputs = tl.load(row + place, there, 0.0).to(tl.float32) * factor
        tile = tl.load(weights + at[:, None] + place[None, :], there[None, :], 0.0).to(tl.float32)
        if KIND == FP8_ROWS:
            tile *= tl.load(scales + scale_at)[:, None]
        if KIND == FP8_BLOCKS:
            tile *= tl.load(scales + scale_at[:, None] + (place // SCALE_K)[None, :], there[None, :], 0.0)
        acc += tile * inputs[None, :]
    return acc


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """silu(gate) * up, gelu(gate) * up, or the clamped gate of gpt-oss; NaN stays NaN."""
    if GATE == CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    elif GATE == GELU:
        gate = gate * 0.5 * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up
