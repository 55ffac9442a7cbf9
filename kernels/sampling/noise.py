"""Counter-based noise: a token's random score is a pure function of (seed, fork, purpose, position, token id).

Two integer hashes, no state and no generator:

- 64 bit, per row: SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
  OOPSLA 2014; constants of Stafford's variant 13) chained over seed, fork and purpose on the host, and over the
  position on the device. It gives two 32-bit key words per draw.
- 32 bit, per token: the rounds of `triple32` (Wellons, "Prospecting for hash functions", 2018, public domain), a
  bijection with an exact bias near 0.02. The two key words are mixed in before the first and the second multiply.

Only integer operations lead to the uniform number, so every device and every batch shape sees the same bits.
"""

import torch
from torch import Tensor

PURPOSE_TOKEN = 0
"""The draw that picks a row's next token. Another draw at the same position needs another number."""

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_MULTIPLY_1 = 0xED5AD4BB
_MULTIPLY_2 = 0xAC4C1B51
_MULTIPLY_3 = 0x31848BAB
_UNIT = 2.0**-31 * (1.0 - 2.0**-24)
"""Scales 31 bits so that the largest, rounded to float32, still ends below 1."""


def stream_key(seed: int, fork: int, purpose: int = PURPOSE_TOKEN) -> int:
    """The part of a draw's key that stays the same for all positions; signed 64 bit, as an int64 tensor wants it."""
    key = 0
    for word in (seed, fork, purpose):
        key = _mix64((key ^ (word & _MASK64)) + _GAMMA)
    return key - (1 << 64) if key >> 63 else key


def uniform(stream: int, position: int) -> float:
    """A number in 0..1 on the host, for a draw that is no token's."""
    return _mix64(((stream ^ position) + _GAMMA) & _MASK64) / 2.0**64


def position_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Keys int32 [rows, 2] of one draw per row, from `stream_key`s int64 [rows] and positions int64 [rows]."""
    key = (streams ^ positions) + _signed(_GAMMA, 64)
    key = (key ^ _shift64(key, 30)) * _signed(_MIX_A, 64)
    key = (key ^ _shift64(key, 27)) * _signed(_MIX_B, 64)
    key = key ^ _shift64(key, 31)
    return key.view(torch.int32).view(-1, 2)


def token_codes(vocab: int, device: torch.device) -> Tensor:
    """int32 [vocab]: token ids spread over 32 bits, so that neighbours share no structure before they are keyed."""
    ids = torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _signed(_GAMMA, 64)
    return _shift64(ids ^ _shift64(ids, 29), 32).to(torch.int32)


def log_exponential(codes: Tensor, keys: Tensor) -> Tensor:
    """Logarithm of a standard exponential variable per (row, token); float32 [rows, n], in about [-22.2, 2.9].

    `argmax(log p - log_exponential)` draws a token with probability p: the exponential race, or the Gumbel-max trick
    with the sign turned.

    Args:
        codes: `token_codes`, int32 [n], or [rows, n] where each row has tokens of its own.
        keys: `position_keys`, int32 [rows, 2].
    """
    words = codes ^ keys[:, :1]
    scratch = torch.empty_like(words)
    _xorshift(words, scratch, 17).mul_(_signed(_MULTIPLY_1, 32))
    _xorshift(words, scratch, 11).add_(keys[:, 1:]).mul_(_signed(_MULTIPLY_2, 32))
    _xorshift(words, scratch, 15).mul_(_signed(_MULTIPLY_3, 32))
    _xorshift(words, scratch, 14).bitwise_and_(0x7FFFFFFF)
    uniform = scratch.view(torch.float32).copy_(words)
    # Small exponentials win, so the resolution lies near uniform = 0, where float32 has plenty.
    return uniform.add_(0.5).mul_(-_UNIT).log1p_().neg_().log_()


def _xorshift(words: Tensor, scratch: Tensor, bits: int) -> Tensor:
    """words ^= words >>> bits. torch shifts int32 with the sign, hence the mask."""
    torch.bitwise_right_shift(words, bits, out=scratch)
    return words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _shift64(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(word: int) -> int:
    word &= _MASK64
    word = ((word ^ (word >> 30)) * _MIX_A) & _MASK64
    word = ((word ^ (word >> 27)) * _MIX_B) & _MASK64
    return word ^ (word >> 31)


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word
