"""GGUF types with one scale per block; layouts and arithmetic after ggml (ggml-quants.c)."""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.gguf_fields import (
    Fields,
    counting_from,
    float16_at,
    unpack_bits,
    unpack_nibbles,
    unpack_pairs,
)

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The four-bit values of IQ4_NL and IQ4_XS, ggml's `kvalues_iq4nl`."""
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the four-bit floats of the OCP MX specification."""


def q8_0(blocks: Tensor) -> Fields:
    """32 weights: scale d, then signed bytes; w = d * q."""
    return Fields(blocks[:, 2:].view(torch.int8), float16_at(blocks, 0))


def q4_0(blocks: Tensor) -> Fields:
    """32 weights: scale d, then 16 bytes whose low halves come first; w = d * (q - 8)."""
    return Fields(unpack_nibbles(blocks[:, 2:], 16), float16_at(blocks, 0), table=counting_from(-8))


def q4_1(blocks: Tensor) -> Fields:
    """32 weights: scale d, minimum m, 16 bytes as of Q4_0; w = d * q + m."""
    codes = unpack_nibbles(blocks[:, 4:], 16)
    return Fields(codes, float16_at(blocks, 0), float16_at(blocks, 2), counting_from(0))


def q5_0(blocks: Tensor) -> Fields:
    """32 weights: scale d, the fifth bits in 4 bytes, 16 bytes as of Q4_0; w = d * (q - 16)."""
    return Fields(_five_bits(blocks[:, 2:]) - 16, float16_at(blocks, 0))


def q5_1(blocks: Tensor) -> Fields:
    """32 weights: scale d, minimum m, the fifth bits in 4 bytes, 16 bytes as of Q4_0; w = d * q + m."""
    return Fields(_five_bits(blocks[:, 4:]), float16_at(blocks, 0), float16_at(blocks, 2))


def iq4_nl(blocks: Tensor) -> Fields:
    """32 weights: as Q4_0 with values of a table; w = d * value."""
    return Fields(unpack_nibbles(blocks[:, 2:], 16), float16_at(blocks, 0), table=IQ4_VALUES)


def mxfp4(blocks: Tensor) -> Fields:
    """32 weights: a power of two, then 16 bytes as of Q4_0; w = 2^(e - 128) * twice the float of four bits."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)  # subnormal below 2^-126
    return Fields(unpack_nibbles(blocks[:, 1:], 16), bits.view(torch.float32), table=E2M1_DOUBLED)


def tq1_0(blocks: Tensor) -> Fields:
    """256 weights: bytes of five digits in base 3 (the last 4: of four), the highest first, and d; w = d * (q - 1)."""
    parts = [_base_three(blocks[:, :32], 5), _base_three(blocks[:, 32:48], 5), _base_three(blocks[:, 48:52], 4)]
    return Fields(torch.cat(parts, dim=1), float16_at(blocks, 52), table=counting_from(-1))


def tq2_0(blocks: Tensor) -> Fields:
    """256 weights: two bits each, d; w = d * (q - 1)."""
    return Fields(unpack_pairs(blocks[:, :64], 32), float16_at(blocks, 64), table=counting_from(-1))


def _five_bits(packed: Tensor) -> Tensor:
    """4 bytes of fifth bits and 16 of the other four: int8 [blocks, 32]."""
    return (unpack_nibbles(packed[:, 4:], 16) | (unpack_bits(packed[:, :4], 1) << 4)).to(torch.int8)


def _base_three(packed: Tensor, digits: int) -> Tensor:
    """A byte is its digits as a fraction of 256: three times it has the first digit above the byte."""
    fractions = torch.cat([packed * 3**place for place in range(digits)], dim=1)  # uint8, of which the digits leave
    return (fractions.int() * 3 >> 8).to(torch.uint8)
