"""GGUF's K-quants: 256 weights in 8 or 16 groups with whole scales; layouts and arithmetic after ggml
(ggml-quants.c)."""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.gguf_basic import IQ4_VALUES
from troupellm.kernels.quantized_linear.gguf_fields import (
    Fields,
    counting_from,
    float16_at,
    unpack_bits,
    unpack_nibbles,
    unpack_pairs,
)


def q2_k(blocks: Tensor) -> Fields:
    """16 groups: scales and minima of four bits, two bits a weight, d, dmin; w = d * scale * q - dmin * min."""
    packed, codes = blocks[:, :16], unpack_pairs(blocks[:, 16:80], 32)
    scale, offset = float16_at(blocks, 80) * (packed & 15), -float16_at(blocks, 82) * (packed >> 4)
    return Fields(codes, scale, offset, counting_from(0))


def q3_k(blocks: Tensor) -> Fields:
    """16 groups: third bits, two low bits, scales of six bits in 12 bytes, d; w = d * (scale - 32) * (q - 4)."""
    codes = unpack_pairs(blocks[:, 32:96], 32) | (unpack_bits(blocks[:, :32], 32) << 2)
    scales = unpack_nibbles(blocks[:, 96:104], 8) | (unpack_pairs(blocks[:, 104:108], 4) << 4)
    return Fields(codes, float16_at(blocks, 108) * (scales.int() - 32), table=counting_from(-4))


def q4_k(blocks: Tensor) -> Fields:
    """8 groups: d, dmin, scales and minima of six bits, four bits a weight; w = d * scale * q - dmin * min."""
    scale, offset = _scales_and_minima(blocks)
    return Fields(unpack_nibbles(blocks[:, 16:], 32), scale, offset, counting_from(0))


def q5_k(blocks: Tensor) -> Fields:
    """8 groups: as Q4_K, with the fifth bits in 32 bytes before the other four."""
    codes = unpack_nibbles(blocks[:, 48:], 32) | (unpack_bits(blocks[:, 16:48], 32) << 4)
    return Fields(codes.to(torch.int8), *_scales_and_minima(blocks))


def q6_k(blocks: Tensor) -> Fields:
    """16 groups: four low bits, two high bits, signed scales, d; w = d * scale * (q - 32)."""
    codes = unpack_nibbles(blocks[:, :128], 64) | (unpack_pairs(blocks[:, 128:192], 32) << 4)
    return Fields(codes.to(torch.int8) - 32, float16_at(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def iq4_xs(blocks: Tensor) -> Fields:
    """8 groups: d, scales of six bits in 2 and 4 bytes, four bits a weight; w = d * (scale - 32) * value."""
    scales = unpack_nibbles(blocks[:, 4:8], 1) | (unpack_pairs(blocks[:, 2:4], 1) << 4)
    scale = float16_at(blocks, 0) * (scales.int() - 32)
    return Fields(unpack_nibbles(blocks[:, 8:], 16), scale, table=IQ4_VALUES)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, float32 [blocks, 8] each."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return float16_at(blocks, 0) * scales, -float16_at(blocks, 2) * minima
