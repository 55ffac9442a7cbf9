"""What a proposer of drafts is, and what it is told.

A proposer lives in the worker, beside the rows. At the beginning of a step it is asked once, for all rows that may
draft, and its drafts are computed and judged in that very step. It may guess as it likes: a draft is kept only where it
equals the token that the model itself draws at that position, so that a bad proposer costs time and never changes a
text.

Order of calls, all from the worker's thread: `add_row` when a row becomes known (also when it comes back after a
preemption), then per step `propose`, at most once, and `observe`, at most once, after the step's tokens are drawn;
`drop_row` at the end. Rows are named by their slots in the row table, which are given away again after `drop_row`.
A plug-in that raises, or gives what no drafts are, is not called again (`guarded`).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.speculation.drafts import Drafts
from troupellm.models.speculation.taps import Taps
from troupellm.protocol.proposer_report import ProposerReport
from troupellm.protocol.worker import NewRow


@dataclass(frozen=True, slots=True)
class RowDraws:
    """How the model will draw the tokens of rows: who draws alike from its own logits is right more often.

    See `coupling.draw_coupled`.
    """

    streams: Tensor
    """int64 [rows]: with a position, the key of its noise; see `kernels.sampling.noise`."""
    inverse_temperature: Tensor
    """float32 [rows]; 0 is greedy."""
    greedy: bool = False
    """Whether all of them are known to be: nobody has to look into the tensor for it."""

    def to(self, device: torch.device) -> "RowDraws":
        """The same on a device."""
        return RowDraws(self.streams.to(device), self.inverse_temperature.to(device), self.greedy)

    def of(self, index: Tensor) -> "RowDraws":
        """Some of the rows, int64 [n]."""
        return RowDraws(self.streams[index], self.inverse_temperature[index], self.greedy)

    def repeated(self, times: int) -> "RowDraws":
        """Every row so many times, one after the other."""
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
    """What the model has computed in a step, of all rows that write, prompt chunks and rows without drafts too:
    consecutive positions of each row, refused drafts left out. The rows' tokens are known up to the one behind the last
    of these positions."""

    slots: NDArray[np.int64]
    """[rows]"""
    starts: NDArray[np.int64]
    """[rows] first position."""
    counts: NDArray[np.int64]
    """[rows] positions, at least 1."""
    hidden: Tensor
    """[sum of counts, width], row after row: the states that `Proposer.taps` names beside each other, the last ones
    last."""
    tokens: Tensor
    """As `ProposalBatch.tokens`."""
    blocks: NDArray[np.int32]
    """As `ProposalBatch.blocks`; they hold these positions, and perhaps not the one behind them."""


class Proposer(Protocol):
    """Guesses the next tokens of rows."""

    taps: Taps

    def add_row(self, slot: int, new: NewRow) -> None:
        """A row has come; nothing of an earlier one in that slot stays. What of its tokens comes from the prefix cache
        is never observed."""

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """A row has gone.

        Args:
            token_ids: [tokens] all that it had, perhaps more at the end than anybody was shown. A view: copy what is
            kept.
        """

    def observe(self, seen: Observation) -> None:
        """Once per step, if `taps` asks for anything."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        """At most `batch.limits` drafts of each row; none where it has no idea."""

    def reset(self) -> None:
        """Forget every row: the cache's content is void. What was learned from rows that have gone may stay."""


@runtime_checkable
class Reporting(Protocol):
    """A proposer with more to tell than drafts."""

    def report(self) -> ProposerReport:
        """How it stands; asked after every step. Its `life` is filled in by whoever made it."""


@runtime_checkable
class Sleeper(Protocol):
    """A proposer that need not see everything: where drafts do not pay it is neither asked nor shown anything."""

    def miss(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Rows [rows] are computed from some positions [rows] on, and it is not shown what comes of that; told again
        when other rows are, or after it was shown something."""
