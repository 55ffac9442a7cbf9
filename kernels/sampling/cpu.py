"""Sampling by compiled code: one walk through the logits, with logarithms for the few tokens that may win."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp import checks, guard
from troupellm.kernels.cpp.checks import check, check_array, require
from troupellm.kernels.sampling.noise import log_exponential, position_keys, token_codes


@dataclass(frozen=True, slots=True)
class Columns:
    """The sampling options that `choose` reads, each row in its own slot. Arrays are parallel and contiguous."""

    streams: NDArray[np.int64]
    """`noise.stream_key`s."""
    scales: NDArray[np.float32]
    """Inverse temperatures; 0 takes the likeliest token."""
    floors: NDArray[np.float32]
    """Logits further than this below a row's largest one, over its temperature, are never drawn; -inf allows all."""

    def __post_init__(self) -> None:
        """
        Raises:
            RefusedCall: an array of another type or length.
        """
        check_array("streams", self.streams, np.int64, self.streams.size)
        check_array("scales", self.scales, np.float32, self.streams.size)
        check_array("floors", self.floors, np.float32, self.streams.size)


@dataclass(frozen=True, slots=True)
class Functions:
    _draw: cpp.Function
    _choose: cpp.Function
    _keep: cpp.Function

    def draw(self, logits: Tensor, keys: Tensor, codes: Tensor) -> Tensor:
        """`sampling.draw` for contiguous `keys` and `codes`, and logits whose rows are.

        Raises:
            RefusedCall: a tensor of another type or shape.
        """
        vocab = logits.shape[1]
        rows, stride = checks.rows_of("logits", logits, vocab)
        check("keys", keys, torch.int32, rows, 2)
        check("codes", codes, torch.int32, vocab)
        tokens = guard.empty("tokens", rows, dtype=torch.int64)
        self._draw(
            logits.data_ptr(),
            stride,
            rows,
            vocab,
            keys.data_ptr(),
            codes.data_ptr(),
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens

    def choose(
        self,
        logits: Tensor,
        columns: Columns,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        codes: Tensor,
        guided: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Each row's next token, from logits that nothing else is to change.

        Args:
            logits: float32 [rows, vocab], contiguous.
            slots, positions: [rows], where its options lie and the index of the token in its sequence.
            codes: `noise.token_codes`.
            guided, bits: int64 [n], rising, and int32 [n, words], contiguous: see `adjust.keep_bits`.

        Returns:
            tokens int64 [rows], -1 where the logits, or those that a mask leaves, have no finite largest one; the
            largest logits float32 [rows], NaN where one is.

        Raises:
            RefusedCall: a tensor or array of another type or shape, or slots that are not in the columns.
        """
        rows, vocab = logits.shape
        check("logits", logits, torch.float32, rows, vocab)
        check("codes", codes, torch.int32, vocab)
        check_array("slots", slots, np.int64, rows)
        check_array("positions", positions, np.int64, rows)
        tokens, peaks = guard.empty("tokens", rows, dtype=torch.int64), guard.empty("peaks", rows)
        masks, words, mask_of, allowed = 0, 0, None, None
        require((guided is None) == (bits is None), "rows of masks and masks are given together")
        if guided is not None and bits is not None:
            check("guided", guided, torch.int64, bits.shape[0])
            check("bits", bits, torch.int32, *bits.shape[:2])
            masks, words, mask_of, allowed = *bits.shape, guided.data_ptr(), bits.data_ptr()
        self._choose(
            logits.data_ptr(),
            vocab,
            rows,
            vocab,
            slots.ctypes.data,
            columns.streams.size,
            columns.streams.ctypes.data,
            columns.scales.ctypes.data,
            columns.floors.ctypes.data,
            positions.ctypes.data,
            codes.data_ptr(),
            mask_of,
            masks,
            allowed,
            words,
            tokens.data_ptr(),
            peaks.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens, peaks

    def keep_bits(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """`adjust.keep_bits` for contiguous `rows` and `bits`, and logits whose rows are.

        Raises:
            RefusedCall: a tensor of another type or shape, or rows that the logits do not have.
        """
        vocab = logits.shape[1]
        every = logits.shape[0]
        stride = checks.check_rows("logits", logits, every, vocab)
        check("rows", rows, torch.int64, bits.shape[0])
        check("bits", bits, torch.int32, *bits.shape[:2])
        self._keep(
            logits.data_ptr(),
            stride,
            every,
            vocab,
            rows.data_ptr(),
            rows.shape[0],
            bits.data_ptr(),
            bits.shape[1],
            torch.get_num_threads(),
        )


@functools.cache
def compiled() -> Functions | None:
    """The compiled functions; None if they are missing or wrong."""
    library = cpp.load()
    if library is None:
        return None
    functions = Functions(
        library.function("draw_tokens", "piiipppi"),
        library.function("choose_tokens", "piii" + "pippp" + "pp" + "pipi" + "ppi"),
        library.function("keep_bits", "piii" + "pipii"),
    )
    return cpp.checked(functions, _agrees(functions), "sampling")


def _agrees(functions: Functions) -> bool:
    generator = torch.Generator().manual_seed(1)
    vocab, all_rows = 77, torch.arange(64)
    logits = torch.randn(64, vocab, generator=generator, dtype=torch.float32) * 3.0
    bits = torch.randint(-(2**31), 2**31, (32, 3), generator=generator).int()
    allowed = ((bits[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :vocab].bool()
    rows = all_rows[::2].contiguous()
    masked = logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))
    codes = token_codes(vocab, logits.device)
    scales = torch.rand(64, generator=generator, dtype=torch.float32) + 0.5
    floors = torch.full((64,), -4.0, dtype=torch.float32)
    scores = (masked - masked.amax(-1, keepdim=True)) * scales[:, None]
    scores = scores.masked_fill_(scores < -4.0, -torch.inf)
    keys = position_keys(all_rows * 7, all_rows)
    right = (scores - log_exponential(codes, keys)).argmax(-1)
    likeliest = all_rows % 5 == 0
    columns = Columns((all_rows * 7).numpy(), scales.masked_fill(likeliest, 0.0).numpy(), floors.numpy())
    tokens, peaks = functions.choose(logits, columns, all_rows.numpy(), all_rows.numpy(), codes, rows, bits)
    wanted = torch.where(likeliest, masked.argmax(-1), right)
    if not torch.equal(tokens, wanted) or not torch.equal(peaks, logits.amax(-1)):
        return False
    functions.keep_bits(logits, rows, bits)
    return torch.equal(logits, masked) and torch.equal(functions.draw(scores, keys, codes), right)
