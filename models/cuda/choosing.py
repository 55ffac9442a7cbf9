"""Tokens behind a step's logits: chosen on the device, appended to the rows there, told of on the host."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.logprobs import chosen_logprobs, floored
from troupellm.models.cuda.columns import CUT, SamplingColumns, choose
from troupellm.models.cuda.penalties import penalize_rows
from troupellm.models.cuda.rows import DeviceRows
from troupellm.models.cuda.staging import Ints, Staging
from troupellm.models.described import Described
from troupellm.models.sampler import Sampled


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

    def append(self, logits: Tensor, columns: Tensor, kind: int, slots: NDArray[np.int64]) -> Tensor:
        """Choose a token for each row, and append it to the row on the device.

        Args:
            logits: float32 [rows, vocab]; overwritten where rows have penalties.
            columns: int64 [columns.WIDTH, rows], on the device.
            kind: the most that any of the rows needs, of those that `choose` knows.
            slots: of the rows, none of whose lengths counts the token yet.

        Returns:
            int64 [rows], as of `choose`; [2, rows] where rows are described: `pairs`, too.
        """
        penalized, raw, sound = self._columns.penalties.among(slots), None, None
        if self._columns.described[slots].any():
            raw = logits.clone() if penalized else logits
        if penalized:
            ends = self._rows.lengths[slots]
            (told,) = self._staging.send(self._columns.penalties.of(slots, ends))
            sound = penalize_rows(logits, told, self._rows.tokens, int(ends.max()))
        tokens = choose(logits, columns, self._codes, kind, self._rows.tokens)
        if sound is not None:
            tokens = tokens.masked_fill(sound.logical_not(), -1)
        return tokens if raw is None else torch.stack((tokens, pairs(raw, tokens)))


def pairs(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [rows]: in its lower half a token's log-probability as bits of a float32, in its upper half its rank."""
    values, ranks = chosen_logprobs(logits, tokens.clamp(min=0))
    return torch.stack((values.view(torch.int32), ranks), dim=1).view(torch.int64).view(-1)


def sampled_of(numbers: Ints, rows: tuple[int, ...], positions: tuple[int, ...], described: tuple[int, ...]) -> Sampled:
    """What the host is to know of a step.

    Args:
        numbers: [rows] or, where some are described, [2 * rows], of `Chooser.append` or of a graph.
    """
    tokens = torch.from_numpy(numbers[: len(rows)])
    peaks = torch.zeros(tokens.shape, dtype=torch.float32).masked_fill_(tokens < 0, torch.nan)
    parts: tuple[Described, ...] = ()
    if described:
        members = list(described)
        halves = torch.from_numpy(numbers[len(rows) :]).view(torch.int32).view(-1, 2)[members]
        values = floored(halves[:, :1].contiguous().view(torch.float32))
        parts = (Described(described, tokens[members][:, None].to(torch.int32), values, halves[:, 1].contiguous()),)
    return Sampled(tokens, rows, positions, peaks, parts, {}, {})
