"""Unpacks bytes and words to one integer per element. All layouts are little-endian, lowest bits first."""

import torch
from torch import Tensor
from torch.nn import functional

WORD = 32
OCTET = 8
WIDTHS = (2, 3, 4, 5, 6, 7, 8)
"""Bits of a number that can be unpacked."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbours within a word of AWQ's gemm layout."""


def words_for(count: int, bits: int) -> int:
    """Words that `count` numbers of `bits` take without gaps."""
    return -(-count * bits // WORD)


def unpack_octets(octets: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] to uint8 [..., n * 8 // bits]: one number behind the other, across the bytes; bits is 2 to 8."""
    if bits == OCTET:
        return octets
    if bits == 4:
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    count = octets.shape[-1] * OCTET // bits
    octets = functional.pad(octets, (0, -octets.shape[-1] % bits))  # eight numbers lie in so many bytes
    eight, found = octets.reshape(*octets.shape[:-1], octets.shape[-1] // bits, bits).int(), []
    for place in range(OCTET):
        first, shift = divmod(place * bits, OCTET)
        number = eight[..., first] >> shift
        if shift + bits > OCTET:
            number = number | eight[..., first + 1] << (OCTET - shift)
        found.append((number & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(found, dim=-1).flatten(-2)[..., :count]


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """As `unpack_octets`, of int32 [..., n]."""
    return unpack_octets(words.contiguous().view(torch.uint8), bits)


def unpack_padded(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] to uint8 [..., n * (32 // bits)]: whole numbers in each word, whose last bits may be unused."""
    numbers = [words >> (bits * place) & ((1 << bits) - 1) for place in range(WORD // bits)]
    return torch.stack(numbers, dim=-1).flatten(-2).to(torch.uint8)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Packed along the first dimension: int32 [n, columns] to uint8 [columns, n * 32 // bits], which is turned over."""
    return unpack_words(words.t(), bits)


def unpack_awq(words: Tensor) -> Tensor:
    """AWQ's gemm layout: int32 [rows, n] to uint8 [rows, n * 8], neighbours in their own order again."""
    return unpack_words(words, 4).view(words.shape[0], -1, 8)[..., list(AWQ_ORDER)].flatten(-2)
