"""Computes sampled-token and top-k log-probabilities for the rows that asked for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from troupellm.kernels.sampling.logprobs import chosen_logprobs, floored, listed_logprobs, token_logprobs
from troupellm.kernels.sampling.truncate import Nucleus, thresholds
from troupellm.models.sampling.row_options import RowOptions
from troupellm.protocol.messages.worker import RowLogprobs
from troupellm.protocol.params.logprobs import LogprobsMode


@dataclass(frozen=True)
class SampledLogprobs:
    """Columns of some rows of a step, on the device. See `RowLogprobs`."""

    members: tuple[int, ...]
    """Indices of the rows within the step."""
    ids: Tensor
    values: Tensor
    ranks: Tensor
    other_ranks: Tensor | None = None

    def entries(self, rows: Sequence[int], positions: Sequence[int], failed: set[int]) -> list[RowLogprobs]:
        """One entry per row that has not failed; waits for the device.

        Args:
            rows, positions: of the step.
            failed: rows.
        """
        ids, values, ranks = (tensor.cpu().numpy() for tensor in (self.ids, self.values, self.ranks))
        others = None if self.other_ranks is None else self.other_ranks.cpu().numpy()
        return [
            RowLogprobs(
                row=rows[member],
                position=positions[member],
                width=ids.shape[1],
                token_ids=ids[i].tobytes(),
                logprobs=values[i].tobytes(),
                ranks=ranks[i].tobytes(),
                other_ranks=b"" if others is None else others[i].tobytes(),
            )
            for i, member in enumerate(self.members)
            if rows[member] not in failed
        ]


class LogprobGroup:
    """Rows of a step that want the same."""

    def __init__(
        self,
        rows: Sequence[RowOptions],
        members: tuple[int, ...],
        *,
        mode: LogprobsMode,
        count: int,
        listed: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """
        Args:
            rows: all of the step.
            members: indices of the group's rows.
            count: how many of the likeliest tokens.
            listed: these tokens instead, if there are any.
        """
        self.members = members
        self.index = torch.tensor(members, dtype=torch.int64, device=device)
        self._processed = mode.startswith("processed")
        self._rows = [rows[member] for member in members]
        self._normalised = mode.endswith("logprobs")
        self._count = count
        self._listed = torch.tensor(listed, dtype=torch.int64, device=device) if listed else None
        self._device = device
        self._alone = device.type != "cpu" and mode == "raw_logprobs" and not count and not listed
        """As `models.gpu.sample` describes such rows, to the bit: a result does not depend on other rows."""

    def raw(self, logits: Tensor) -> Tensor | None:
        """Scores [members, vocab] as the model gave them; None if the processed ones are wanted.

        Args:
            logits: [all rows, vocab], not processed yet.
        """
        if self._processed:
            return None
        if not self._normalised or self._alone:
            return logits.index_select(0, self.index)
        whole_step = len(self.members) == logits.shape[0]  # members are in order, so no copy is needed
        return (logits if whole_step else logits.index_select(0, self.index)).log_softmax(-1)

    def drawn_from(self, logits: Tensor) -> Tensor:
        """Scores [members, vocab], as they are when a token is drawn: cut off, and over the temperature."""
        scores = logits.index_select(0, self.index)
        drawn, scale, log_min_p, cut, nucleus = self._drawing
        if drawn.numel():
            part = scores[drawn] * scale
            relative = part - part.amax(-1, keepdim=True)
            part.masked_fill_(relative < log_min_p, -torch.inf)
            if cut.numel():
                kept = relative[cut].masked_fill_(relative[cut] < log_min_p[cut], -torch.inf)
                narrow = part[cut]
                narrow.masked_fill_(kept < thresholds(kept, nucleus), -torch.inf)
                part[cut] = narrow
            scores[drawn] = part
        return scores.log_softmax(-1) if self._normalised else scores

    def compute(self, scores: Tensor, tokens: Tensor) -> SampledLogprobs:
        """tokens: int64 [all rows], valid ids."""
        chosen = tokens[self.index]
        if self._listed is not None:
            return SampledLogprobs(self.members, *listed_logprobs(scores, chosen, self._listed))
        if self._alone:
            values, ranks = chosen_logprobs(scores, chosen)
            return SampledLogprobs(self.members, chosen[:, None].to(torch.int32), floored(values)[:, None], ranks)
        return SampledLogprobs(self.members, *token_logprobs(scores, chosen, self._count))

    @cached_property
    def _drawing(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Nucleus]:
        """Indices of members that draw, their scales and least log-probabilities; indices with a nucleus, and it."""
        drawn = [i for i, row in enumerate(self._rows) if not row.greedy]
        options = [self._rows[i] for i in drawn]
        cut = [i for i, row in enumerate(options) if row.prefix is not None]
        nucleus = Nucleus(
            torch.tensor([[options[i].top_k] for i in cut], dtype=torch.int64, device=self._device).view(-1, 1),
            torch.tensor([[options[i].state.top_p] for i in cut], dtype=torch.float64, device=self._device).view(-1, 1),
        )
        return (
            torch.tensor(drawn, dtype=torch.int64, device=self._device),
            self._column([row.inverse_temperature for row in options]),
            self._column([row.log_min_p for row in options]),
            torch.tensor(cut, dtype=torch.int64, device=self._device),
            nucleus,
        )

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]


def logprob_groups(rows: Sequence[RowOptions], device: torch.device) -> tuple[LogprobGroup, ...]:
    """Group a step's rows by their kind of log-probabilities; empty if no row asks for any."""
    wanted: dict[tuple[LogprobsMode, int, tuple[int, ...]], list[int]] = {}
    for i, row in enumerate(rows):
        state = row.state
        if state.logprobs >= 0:
            count = 0 if state.logprob_token_ids else state.logprobs
            wanted.setdefault((state.logprobs_mode, count, state.logprob_token_ids), []).append(i)
    return tuple(
        LogprobGroup(rows, tuple(members), mode=mode, count=count, listed=listed, device=device)
        for (mode, count, listed), members in sorted(wanted.items())
    )


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, row: int, first_position: int, token_ids: Tensor | Sequence[int], count: int
) -> RowLogprobs:
    """Log-probabilities of given tokens.

    Args:
        logits: [tokens, vocab]; those at position p predict the token at p + 1.
        first_position: position of the first of `token_ids`.
        token_ids: the tokens that stand where the logits predict, [tokens].
        count: top alternatives per token.
    """
    chosen = torch.as_tensor(token_ids, device=logits.device).long()
    ids, values, ranks = (part.cpu().numpy() for part in token_logprobs(logits.float().log_softmax(-1), chosen, count))
    return RowLogprobs(
        row=row,
        position=first_position,
        width=ids.shape[1],
        token_ids=ids.tobytes(),
        logprobs=values.tobytes(),
        ranks=ranks.tobytes(),
    )
