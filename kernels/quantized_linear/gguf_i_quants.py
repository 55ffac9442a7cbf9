"""GGUF's I-quants below four bits: 256 weights, of which 4 or 8 together are an entry of a grid of magnitudes; layouts
and arithmetic after ggml (ggml-quants.c).

A code is the place of a magnitude with the sign as its bit of value 8, so that a table of 16 has every weight.
"""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.gguf_fields import Fields, float16_at, unpack_bits, unpack_nibbles, unpack_pairs
from troupellm.kernels.quantized_linear.gguf_grids import GridName, grid

NEGATIVE = 8
"""The bit of a code that is the sign."""
MAGNITUDES_2 = (8, 25, 43, 0, 0, 0, 0, 0)
"""Magnitudes of IQ2_XXS, IQ2_XS and IQ2_S; zeros are never chosen."""
MAGNITUDES_3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
MAGNITUDES_3_S = (1, 3, 5, 7, 9, 11, 13, 15)
RAISED, LOWERED = (-7, 1, 9, 0, 0, 0, 0, 0), (-9, -1, 7, 0, 0, 0, 0, 0)
"""Values of IQ1_S and IQ1_M: eight times -1, 0 and 1, plus or minus 1."""
SIGN_SHIFTS = (0, 7, 14, 21)
"""Bit offsets of the four seven-bit numbers that encode the signs of eight weights each."""


def iq2_xxs(blocks: Tensor) -> Fields:
    """8 groups: d; four entries in a byte each; then four numbers for signs and a scale of four bits in 32 bits."""
    words = blocks[:, 2:].reshape(-1, 8, 8)
    packed = _words32(words[..., 4:].flatten(1))
    scale = float16_at(blocks, 0) * (0.5 + (packed >> 28 & 15).float()) * 0.25
    return _signed("IQ2_XXS", words[..., :4].flatten(1), _even_signs(_parts(packed, SIGN_SHIFTS, 127)), scale)


def iq2_xs(blocks: Tensor) -> Fields:
    """16 groups: d; 32 numbers of nine bits for an entry and seven for its signs; scales of four bits."""
    packed = _words16(blocks[:, 2:66])
    scale = float16_at(blocks, 0) * (0.5 + unpack_nibbles(blocks[:, 66:], 1).float()) * 0.25
    return _signed("IQ2_XS", packed & 511, _even_signs(packed >> 9), scale)


def iq2_s(blocks: Tensor) -> Fields:
    """16 groups: d; low bytes of 32 entries; bytes of signs; two high bits of entries; scales of four bits."""
    entries = blocks[:, 2:34].int() | unpack_pairs(blocks[:, 66:74], 1).int() << 8
    scale = float16_at(blocks, 0) * (0.5 + unpack_nibbles(blocks[:, 74:], 1).float()) * 0.25
    return _signed("IQ2_S", entries, blocks[:, 34:66], scale)


def iq3_xxs(blocks: Tensor) -> Fields:
    """8 groups: d; 64 entries of four weights; then four numbers for signs and a scale of four bits in 32 bits."""
    packed = _words32(blocks[:, 66:])
    scale = float16_at(blocks, 0) * (0.5 + (packed >> 28 & 15).float()) * 0.5
    return _signed("IQ3_XXS", blocks[:, 2:66], _even_signs(_parts(packed, SIGN_SHIFTS, 127)), scale)


def iq3_s(blocks: Tensor) -> Fields:
    """8 groups: d; low bytes of 64 entries of four weights; their ninth bits; bytes of signs; scales of four bits."""
    entries = blocks[:, 2:66].int() | unpack_bits(blocks[:, 66:74], 1).int() << 8
    scale = float16_at(blocks, 0) * (1 + 2 * unpack_nibbles(blocks[:, 106:], 1))
    return _signed("IQ3_S", entries, blocks[:, 74:106], scale)


def iq1_s(blocks: Tensor) -> Fields:
    """8 groups: d; low bytes of 32 entries; then 16 bits: three for each of four entries, scale, lowered or raised."""
    high = _words16(blocks[:, 34:])
    entries = blocks[:, 2:34].int() | _parts(high, (0, 3, 6, 9), 7) << 8
    scale = float16_at(blocks, 0) * (2 * (high >> 12 & 7) + 1)
    return _shifted(entries, (high >> 15 & 1).repeat_interleave(4, dim=1), scale)


def iq1_m(blocks: Tensor) -> Fields:
    """16 groups: low bytes of 32 entries; four bits more for each (three, and lowered or raised); 64 bits of scales.

    Of the scales every 16 bits have four of three bits and above them four bits of the float16 that is d.
    """
    high, scales = unpack_nibbles(blocks[:, 32:48], 1).int(), _words16(blocks[:, 48:])
    entries = blocks[:, :32].int() | (high & 7) << 8
    bits = torch.cat([(scales[:, place : place + 1] >> 12) << 4 * place for place in range(4)], dim=1)
    number = bits.sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16).float()
    return _shifted(entries, high >> 3, number * (2 * _parts(scales, (0, 3, 6, 9), 7) + 1))


def _signed(name: GridName, entries: Tensor, signs: Tensor, scale: Tensor) -> Fields:
    """Entries of a grid, int [blocks, entries], with the signs of eight weights in a byte, uint8 [blocks, 32]."""
    negative = unpack_bits(signs, 1)
    codes = grid(name).to(entries.device)[entries.long()].flatten(1) | negative * NEGATIVE
    magnitudes = {"IQ3_XXS": MAGNITUDES_3_XXS, "IQ3_S": MAGNITUDES_3_S}.get(name, MAGNITUDES_2)
    return Fields(codes, scale, table=(*magnitudes, *(-size for size in magnitudes)))


def _shifted(entries: Tensor, lowered: Tensor, scale: Tensor) -> Fields:
    """Entries of the grid of -1, 0 and 1, all weights of one an eighth lower (1) or higher (0); both [blocks, 32]."""
    codes = grid("IQ1").to(entries.device)[entries.long()] | (lowered.to(torch.uint8) * NEGATIVE)[..., None]
    return Fields(codes.flatten(1), scale / 8, table=(*RAISED, *LOWERED))


def _even_signs(numbers: Tensor) -> Tensor:
    """The signs of eight weights for seven bits: the eighth makes the number of minus signs even."""
    folded = numbers ^ numbers >> 4
    folded = folded ^ folded >> 2
    odd = (folded ^ folded >> 1) & 1
    return (numbers | odd << 7).to(torch.uint8)


def _parts(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Numbers of a few bits in each word: [blocks, words] to [blocks, words * number of shifts]."""
    return torch.stack([packed >> shift & mask for shift in shifts], dim=-1).flatten(1)


def _words16(data: Tensor) -> Tensor:
    """Little-endian numbers of 16 bits, int32 [blocks, bytes / 2]."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.int16).int() & 0xFFFF


def _words32(data: Tensor) -> Tensor:
    """Little-endian numbers of 32 bits, int32 [blocks, bytes / 4]; the highest bit is the sign."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.int32)
