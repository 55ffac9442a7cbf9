"""Unpacks bytes and words to one integer per element. All layouts are little-endian, lowest bits first."""

import torch
from torch import Tensor

WORD = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbours within a word of AWQ's gemm layout."""


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] to uint8 [..., n * 32 / bits]; bits is 4 or 8."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Packed along the first dimension: int32 [n, columns] to uint8 [columns, n * 32 / bits], which is turned over."""
    return unpack_words(words.t(), bits)


def unpack_awq(words: Tensor) -> Tensor:
    """AWQ's gemm layout: int32 [rows, n] to uint8 [rows, n * 8], neighbours in their own order again."""
    return unpack_words(words, 4).view(words.shape[0], -1, 8)[..., list(AWQ_ORDER)].flatten(-2)


def unpack_sixes(octets: Tensor) -> Tensor:
    """Four codes of six bits in three bytes: uint8 [rows, n * 3 / 4] to uint8 [rows, n]."""
    first, second, third = octets.view(octets.shape[0], -1, 3).unbind(-1)
    codes = (first & 63, (first >> 6) | ((second & 15) << 2), (second >> 4) | ((third & 3) << 4), third >> 2)
    return torch.stack(codes, dim=-1).flatten(-2)
