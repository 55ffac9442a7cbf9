"""Tokens behind a step's logits: chosen on the device, appended to the rows there, told of on the host."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.adjust import keep_bits
from troupellm.kernels.sampling.logprobs import chosen_logprobs, floored
from troupellm.kernels.sampling.search import row_best
from troupellm.models.cuda.columns import CUT, SamplingColumns, choose
from troupellm.models.cuda.penalties import penalize_rows
from troupellm.models.cuda.rows import DeviceRows, Ints32
from troupellm.models.cuda.staging import Ints, Staging
from troupellm.models.described import Described
from troupellm.models.guides.masks import TokenMasks
from troupellm.models.sampler import Sampled
from troupellm.protocol.worker import RowError

UNFIT, MASKED = -1, -2
"""Instead of a token: the logits were no numbers; a guide has left none."""
NO_REASONS: Mapping[int, RowError] = {}


class Chooser:
    """Chooses what no graph has chosen, without a wait for the device."""

    def __init__(self, columns: SamplingColumns, codes: Tensor, rows: DeviceRows, staging: Staging) -> None:
        """codes: `noise.token_codes`."""
        self._columns, self._codes, self._rows, self._staging = columns, codes, rows, staging

    def takes(self, slots: NDArray[np.int64], kind: int) -> bool:
        """Whether a step of these rows needs it, and its graph is to give logits alone."""
        return kind == CUT or self._columns.penalties.among(slots) or bool(self._columns.described[slots].any())

    def described(self, slots: NDArray[np.int64]) -> tuple[int, ...]:
        """Which of the rows are told their token's log-probability."""
        return tuple(np.flatnonzero(self._columns.described[slots]).tolist())

    def append(
        self, logits: Tensor, columns: Tensor, kind: int, slots: Ints, ends: Ints, masks: TokenMasks | None = None
    ) -> Tensor:
        """Choose a token for each row, and append it to the row on the device.

        Args:
            logits: float32 [rows, vocab]; overwritten where rows have masks or penalties.
            columns: int64 [columns.WIDTH, rows], on the device.
            kind: the most that any of the rows needs, of those that `choose` knows.
            slots: of the rows.
            ends: tokens that each row has, without this one.
            masks: on the host, what guided rows may choose.

        Returns:
            int64 [rows], a token, `UNFIT` or `MASKED`; [2, rows] where rows are described: `pairs`, too.
        """
        penalized, raw, fit, sound = self._columns.penalties.among(slots), None, None, None
        if self._columns.described[slots].any():
            raw = logits if not penalized and masks is None else logits.clone()
        if masks is not None:
            fit = row_best(logits)[1].abs() < torch.inf
            self._mask(logits, masks)
        if penalized:
            (told,) = self._staging.send(self._columns.penalties.of(slots, ends))
            sound = penalize_rows(logits, told, self._rows.tokens, int(ends.max()))
        tokens = choose(logits, columns, self._codes, kind, self._rows.tokens)
        if sound is not None:
            tokens = tokens.masked_fill(sound.logical_not(), UNFIT)
        if fit is not None:
            tokens = tokens.masked_fill((tokens < 0) & fit, MASKED)
        return tokens if raw is None else torch.stack((tokens, pairs(raw, tokens)))

    def _mask(self, logits: Tensor, masks: TokenMasks) -> None:
        bits: Ints32 = masks.bits.numpy()
        words = np.zeros(-(-bits.size // 2), np.int64)
        words.view(np.int32)[: bits.size] = bits.reshape(-1)
        rows, sent = self._staging.send(masks.index.numpy(), words)
        keep_bits(logits, rows, sent.view(torch.int32)[: bits.size].view(bits.shape))


def pairs(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [rows]: in its lower half a token's log-probability as bits of a float32, in its upper half its rank."""
    values, ranks = chosen_logprobs(logits, tokens.clamp(min=0))
    return torch.stack((values.view(torch.int32), ranks), dim=1).view(torch.int64).view(-1)


def sampled_of(
    numbers: Ints, rows: tuple[int, ...], positions: tuple[int, ...], described: tuple[int, ...],
    reasons: Mapping[int, RowError] = NO_REASONS,
) -> Sampled:  # fmt: skip
    """What the host is to know of a step.

    Args:
        numbers: [rows] or, where some are described, [2 * rows], of `Chooser.append` or of a graph.
        reasons: as of `Sampled`.
    """
    tokens = torch.from_numpy(numbers[: len(rows)])
    peaks = torch.zeros(tokens.shape, dtype=torch.float32).masked_fill_(tokens == UNFIT, torch.nan)
    parts: tuple[Described, ...] = ()
    if described:
        members = list(described)
        halves = torch.from_numpy(numbers[len(rows) :]).view(torch.int32).view(-1, 2)[members]
        values = floored(halves[:, :1].contiguous().view(torch.float32))
        parts = (Described(described, tokens[members][:, None].to(torch.int32), values, halves[:, 1].contiguous()),)
    return Sampled(tokens, rows, positions, peaks, parts, {}, reasons)
