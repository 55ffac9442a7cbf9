"""Chooses tokens from a step's logits on the device, appends them to the rows there, and reports them to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

from troupellm.kernels.sampling.adjust import keep_bits
from troupellm.kernels.sampling.search import row_best
from troupellm.models.gpu.host_transfer import Ints, Staging, doubled
from troupellm.models.gpu.logprobs import NOTHING, Group, groups_of, pack, unpack
from troupellm.models.gpu.penalties import penalize_rows
from troupellm.models.gpu.row_table import DeviceRows, Ints32
from troupellm.models.gpu.sampling_tensors import SamplingTensors, choose
from troupellm.models.sampling.logprobs import SampledLogprobs
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.sampler import Sampled
from troupellm.protocol.messages.worker import RowError

UNFIT, MASKED = -1, -2
"""Instead of a token: the logits were no numbers; none was left to choose from."""


class Chooser:
    """Chooses the tokens that no graph has chosen, without a wait for the device."""

    def __init__(self, columns: SamplingTensors, codes: Tensor, rows: DeviceRows, staging: Staging) -> None:
        """codes: `noise.token_codes`."""
        self._columns, self._codes, self._rows, self._staging = columns, codes, rows, staging

    def takes(self, slots: Ints) -> bool:
        """True if a step of these rows needs a `Chooser`, so that its graph must end with logits."""
        columns = self._columns
        changed = columns.penalties.among(slots) or columns.adjustments.among(slots)
        return changed or bool((columns.num_logprobs[slots] != NOTHING).any())

    def logprob_parts(self, slots: Ints) -> tuple[Group, ...]:
        """The rows that get log-probabilities, grouped by how many."""
        return groups_of(self._columns.num_logprobs[slots])

    def append(
        self, logits: Tensor, columns: Tensor, kind: int, slots: Ints, ends: Ints, masks: TokenMasks | None = None
    ) -> Tensor:
        """Choose a token for each row, and append it to the row on the device.

        Args:
            logits: float32 [rows, vocab]; overwritten where rows change them.
            columns: int64 [columns.WIDTH, rows], on the device.
            kind: the most that any of the rows needs, of those that `choose` knows.
            slots: of the rows.
            ends: tokens that each row has, without this one.
            masks: on the host, the tokens that guided rows may choose.

        Returns:
            int64 [rows and more], of each row its token, `UNFIT` or `MASKED`; then what `logprob_parts` rows are told.
        """
        penalized, adjusted = self._columns.penalties.among(slots), self._columns.adjustments.among(slots)
        groups, fit, sound = self.logprob_parts(slots), None, None
        if adjusted:
            logits = logits.contiguous()
        raw = logits.clone() if groups and (masks is not None or adjusted or penalized) else logits
        if masks is not None or adjusted:
            fit = row_best(logits)[1].abs() < torch.inf
        if masks is not None:
            self.mask(logits, masks.index.numpy(), masks.bits.numpy())
        if adjusted:
            self._columns.adjustments.apply(logits, slots, ends, self._staging)
        if penalized:
            (penalties,) = self._staging.send(self._columns.penalties.of(slots, ends))
            sound = penalize_rows(logits, penalties, self._rows.tokens, int(ends.max()))
        tokens = choose(logits, columns, self._codes, kind, self._rows.tokens)
        if sound is not None:
            tokens = tokens.masked_fill(sound.logical_not(), UNFIT)
        if fit is not None:
            tokens = tokens.masked_fill(tokens < 0, MASKED).masked_fill(fit.logical_not(), UNFIT)
        return torch.cat((tokens, *pack(groups, raw, tokens, self._staging))) if groups else tokens

    def mask(self, logits: Tensor, rows: Ints, bits: Ints32) -> None:
        """`adjust.keep_bits` with numbers of the host."""
        index, sent = self._staging.send(rows, doubled(bits))
        keep_bits(logits, index, sent.view(torch.int32)[: bits.size].view(bits.shape))


def sampled_of(
    numbers: Ints,
    rows: tuple[int, ...],
    positions: tuple[int, ...],
    groups: tuple[Group, ...],
    vocab: int,
    reasons: Mapping[int, RowError],
) -> Sampled:
    """A step's result as the host reads it.

    Args:
        numbers: of `Chooser.append` or of a graph.
        vocab: the logits' width.
        reasons: as of `Sampled`.
    """
    tokens = torch.from_numpy(numbers[: len(rows)])
    peaks = torch.zeros(tokens.shape, dtype=torch.float32).masked_fill_(tokens == UNFIT, torch.nan)
    logprob_parts = unpack(groups, numbers[len(rows) :], tokens, vocab)
    return Sampled(tokens, rows, positions, peaks, logprob_parts, {}, reasons)


def only(sampled: Sampled, kept: list[int]) -> Sampled:
    """Some of the rows, by index."""
    places = {there: here for here, there in enumerate(kept)}
    return Sampled(
        sampled.tokens[kept],
        tuple(sampled.rows[place] for place in kept),
        tuple(sampled.positions[place] for place in kept),
        sampled.peaks[kept],
        tuple(_part(part, places) for part in sampled.logprob_parts),
        {},
        {
            places[there]: sampled.reasons[there]
            for there in kept
            if sampled.tokens[there] < 0 and there in sampled.reasons
        },
    )


def _part(part: SampledLogprobs, places: Mapping[int, int]) -> SampledLogprobs:
    left = [number for number, member in enumerate(part.members) if member in places]
    members = tuple(places[part.members[number]] for number in left)
    return SampledLogprobs(members, part.ids[left], part.values[left], part.ranks[left])
