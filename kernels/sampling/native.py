"""Sampling by compiled code: one walk through the logits, with logarithms for the few tokens that may win."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels import native
from troupellm.kernels.sampling.noise import log_exponential, position_keys, token_codes


@dataclass(frozen=True, slots=True)
class Functions:
    _draw: native.Function
    _keep: native.Function

    def draw(
        self, logits: Tensor, keys: Tensor, codes: Tensor, peaks: Tensor | None = None, scales: Tensor | None = None,
        floors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`sampling.draw`, or with the last ones `draw_tempered`: contiguous, but for logits whose rows are."""
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        self._draw(
            logits.data_ptr(), logits.stride(0), rows, vocab, _address(peaks), _address(scales), _address(floors),
            keys.data_ptr(), codes.data_ptr(), tokens.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    def keep_bits(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """`adjust.keep_bits` for contiguous `rows` and `bits`, and logits whose rows are."""
        self._keep(
            logits.data_ptr(), logits.stride(0), logits.shape[1], rows.data_ptr(), rows.numel(), bits.data_ptr(),
            bits.shape[1], torch.get_num_threads(),
        )  # fmt: skip


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


@functools.cache
def compiled() -> Functions | None:
    """None where the compiled code is not there or wrong."""
    library = native.load()
    if library is None:
        return None
    functions = Functions(
        library.function("draw_tokens", "piii" + "pppppp" + "i"), library.function("keep_bits", "piipipii")
    )
    return functions if _agrees(functions) else None


def _agrees(functions: Functions) -> bool:
    generator = torch.Generator().manual_seed(1)
    vocab, everyone = 77, torch.arange(64)
    logits = torch.randn(64, vocab, generator=generator) * 3.0
    bits = torch.randint(-(2**31), 2**31, (32, 3), generator=generator).to(torch.int32)
    allowed = ((bits[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :vocab].bool()
    rows = everyone[::2].contiguous()
    masked = logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))
    functions.keep_bits(logits, rows, bits)
    keys, codes = position_keys(everyone * 7, everyone), token_codes(vocab, logits.device)
    peaks, scales, floors = masked.amax(-1), torch.rand(64, generator=generator) + 0.5, torch.full((64,), -4.0)
    scores = (masked - peaks[:, None]) * scales[:, None]
    scores = scores.masked_fill_(scores < -4.0, -torch.inf) - log_exponential(codes, keys)
    drawn = functions.draw(logits, keys, codes, peaks, scales, floors)
    return torch.equal(logits, masked) and torch.equal(drawn, scores.argmax(-1))
