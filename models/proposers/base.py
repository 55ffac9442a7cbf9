"""The interface of a proposer of draft tokens.

A proposer lives in the worker, beside the rows. At the beginning of a step it is called once, for all rows that may
draft, and its drafts are computed and verified in that very step. Its guesses may be arbitrary: a draft is kept only if
it equals the token that the model itself draws at that position. A bad proposer costs time and never changes a text.

Order of calls, all from the worker's thread: `add_row` when a row becomes known, also when it comes back after a
preemption. Then per step at most one `propose`, and at most one `observe` after the step's tokens are drawn. `drop_row`
at the end. Rows are named by their slots in the row table, which are reused after `drop_row`. A plug-in that raises, or
returns invalid drafts, is not called again (`guarded`).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.worker import NewRow


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Options by which the model will draw the rows' tokens: a proposer that draws by them is right more often.

    See `coupled_draws.draw_coupled`.
    """

    streams: Tensor
    """int64 [rows]: with a position, the key of its noise; see `kernels.sampling.noise`."""
    inverse_temperature: Tensor
    """float32 [rows]; 0 is greedy."""
    greedy: bool = False
    """True if all rows are known to be greedy, so that the tensor need not be read."""

    def to(self, device: torch.device) -> "RowDraws":
        """A copy on a device."""
        return RowDraws(self.streams.to(device), self.inverse_temperature.to(device), self.greedy)

    def of(self, index: Tensor) -> "RowDraws":
        """Some of the rows, int64 [n]."""
        return RowDraws(self.streams[index], self.inverse_temperature[index], self.greedy)

    def repeated(self, times: int) -> "RowDraws":
        """Every row repeated `times` times, row after row."""
        return RowDraws(
            self.streams.repeat_interleave(times), self.inverse_temperature.repeat_interleave(times), self.greedy
        )


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """The rows of a step that may draft."""

    slots: NDArray[np.int64]
    """[rows], each once."""
    lengths: NDArray[np.int64]
    """[rows] tokens of each row; the last one is not computed yet, and perhaps some before it. The first draft would
    stand at this position."""
    limits: NDArray[np.int64]
    """[rows] most drafts wanted of each, at least 1."""
    tokens: Tensor
    """int32 [slots, max_model_len + 1]: of row i, `tokens[slots[i], :lengths[i]]`. To be read only, and not to be kept:
    the table moves when it grows."""
    blocks: NDArray[np.int32]
    """[groups, slots, width] block tables. They hold the positions before `lengths + limits`; a proposer with a KV
    cache of its own layers writes to the same blocks, at the positions of its tokens, and to no others."""
    draws: RowDraws


@dataclass(frozen=True, slots=True)
class Observation:
    """Results of the model in a step, for all rows that generate, prompt chunks and rows without drafts included:
    consecutive positions of each row without rejected drafts. The rows' tokens are known up to the one behind the last
    of these positions."""

    slots: NDArray[np.int64]
    """[rows]"""
    starts: NDArray[np.int64]
    """[rows] first position."""
    counts: NDArray[np.int64]
    """[rows] positions, at least 1."""
    hidden: Tensor
    """[sum of counts, width], row after row: the states that `Proposer.aux_hidden_states` names beside each other, the
    last ones last."""
    tokens: Tensor
    """As `ProposalBatch.tokens`."""
    blocks: NDArray[np.int32]
    """As `ProposalBatch.blocks`; they hold these positions, and perhaps not the one behind them."""


class Proposer(Protocol):
    """Guesses the next tokens of rows."""

    aux_hidden_states: AuxHiddenStates

    def add_row(self, slot: int, new: NewRow) -> None:
        """A row has come, which replaces any earlier one in that slot. Its tokens from the prefix cache are never
        observed."""

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """A row has gone.

        Args:
            token_ids: [tokens] all of its tokens, perhaps more at the end than were sent to the client. A view: copy
                it to keep it.
        """

    def observe(self, seen: Observation) -> None:
        """Once per step, if `aux_hidden_states.wanted`."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        """At most `batch.limits` drafts of each row; none if it has no guess."""

    def reset(self) -> None:
        """Forget every row: the cache's content is void. Knowledge from rows that have gone may stay."""


@runtime_checkable
class Reporting(Protocol):
    """A proposer with figures for metrics."""

    def report(self) -> ProposerReport:
        """Its state and figures; called after every step. The caller fills in `life`."""


@runtime_checkable
class Sleeper(Protocol):
    """A proposer that may skip steps: while drafts do not pay, neither `propose` nor `observe` is called."""

    def miss(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Rows [rows] are computed from these positions [rows] on without `observe`. Called again when the set of rows
        changes, or after a call of `observe`."""
