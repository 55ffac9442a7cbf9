"""Acceptance at random instead of by the model, for benchmarks: measures steps that keep a given mean number of tokens.

The output tokens are the drafts, not the model's.
"""

from collections.abc import Callable, Sequence

from troupellm.kernels.sampling.noise import stream_key, uniform
from troupellm.models.batch.row_drafts import ROOT, RowDrafts
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.speculation.verify_batch import Acceptance, VerifyBatch

PURPOSE_ACCEPTANCE = 1
"""See `kernels.sampling.noise.stream_key`."""


class SyntheticAcceptance:
    """Accepts each draft with the same probability, given that the one before it was, so that steps give a wanted
    number of tokens on average where `most` drafts are verified."""

    def __init__(self, length: float, most: int) -> None:
        """
        Args:
            length: mean tokens of a step and row, the one behind the last accepted draft included: 1..most + 1.

        Raises:
            ValueError: no such length.
        """
        if not 1 <= length <= most + 1:
            raise ValueError(f"synthetic_acceptance_length must be 1..{most + 1}, not {length}")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if 1 + sum(middle**count for count in range(1, most + 1)) < length:
                low = middle
            else:
                high = middle
        self.probability = high

    def count(self, stream: int, position: int, drafts: int) -> int:
        """How many of a row's drafts are accepted, of which the first would stand at `position`.

        Args:
            stream: a `stream_key` of the row for PURPOSE_ACCEPTANCE.
        """
        for index in range(drafts):
            if uniform(stream, position + index) >= self.probability:
                return index
        return drafts


def fill_up(drafts: RowDrafts, limit: int) -> None:
    """Fill the drafts up to the requested number: the benchmark measures work, for any finds of the proposer."""
    missing = limit - len(drafts)
    if missing > 0 and drafts.parents is None:
        drafts.tokens += [0] * missing
    elif missing > 0 and drafts.parents is not None:
        first = len(drafts)
        drafts.tokens += [0] * missing
        drafts.parents += [first - 1 + number if first + number else ROOT for number in range(missing)]


class ByLot(Acceptance):
    """Chooses the kept drafts of one step at random."""

    def __init__(
        self,
        lot: SyntheticAcceptance,
        options: Callable[[int], RowOptions],
        rows: Sequence[int],
        verify_batch: VerifyBatch,
    ) -> None:
        self._lot, self._options, self._rows, self._round = lot, options, rows, verify_batch

    def __call__(self, row: int, drafts: RowDrafts, drawn: Sequence[int]) -> list[int]:
        state = self._options(self._rows[int(self._round.spans.rows[row])]).state
        stream = stream_key(state.seed, state.fork, PURPOSE_ACCEPTANCE)
        deepest = int(drafts.depths().argmax()) if len(drafts) else 0
        path = drafts.ancestors(deepest)
        return path[: self._lot.count(stream, int(self._round.lengths[row]), len(path))]
