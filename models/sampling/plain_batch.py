"""Options of rows that only draw from the whole vocabulary or take the likeliest token. They lie in columns, from which
a step's options are gathered at once.

Rows that skip steps give every step another set of rows, so that `SamplingBatch` would be built anew in each.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.cpu import Columns
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.sampling.sampling_batch import Choice, RandomRows

_FIRST_SLOTS = 16


class PlainRows:
    """Keeps the sampling options of a sampler's plain rows in columns, and the set of rows that need more options."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._others: set[int] = set()
        """Rows that need more options; they have no slots."""
        self._greedy: set[int] = set()
        self._with_min_p: set[int] = set()
        self._last: tuple[tuple[int, ...], NDArray[np.int64]] | None = None
        """Rows that were asked for last, and their slots."""
        self.columns = Columns(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))

    def put(self, row: int, options: RowOptions) -> None:
        """Make a row known, or replace it."""
        self.drop(row)
        if not options.plain or not (options.greedy or options.prefix is None):
            self._others.add(row)
            return
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        self.columns.streams[slot] = options.stream
        self.columns.scales[slot] = options.inverse_temperature
        self.columns.floors[slot] = options.log_min_p
        if options.greedy:
            self._greedy.add(row)
        elif options.state.min_p > 0:
            self._with_min_p.add(row)

    def drop(self, row: int) -> None:
        """Forget a row; an unknown one is fine."""
        slot, self._last = self._slots.pop(row, None), None
        if slot is not None:
            self._free.append(slot)
        for rows in (self._others, self._greedy, self._with_min_p):
            rows.discard(row)

    def slots(self, rows: Sequence[int]) -> NDArray[np.int64] | None:
        """The rows' slots in the columns; None if one of the rows needs more options. Returns the same array
        again while the same rows are asked for.

        Args:
            rows: known ones; a row may occur more than once.
        """
        rows = tuple(rows)
        if self._last is not None and self._last[0] == rows:
            return self._last[1]
        if not self._others.isdisjoint(rows):
            return None
        found = np.fromiter(map(self._slots.__getitem__, rows), np.int64, len(rows))
        self._last = rows, found
        return found

    def choice(self, rows: Sequence[int], device: torch.device) -> Choice | None:
        """The choice of tokens for a step's rows, in the order of their logits; None if one of them needs more options.

        Args:
            rows: known ones; a row may occur more than once.
        """
        if not self._others.isdisjoint(rows):
            return None
        if self._greedy.issuperset(rows):
            return Choice(None, None)
        slots = np.fromiter(map(self._slots.__getitem__, rows), np.int64, len(rows))
        index, greedy = np.arange(len(rows)), np.zeros(0, dtype=np.int64)
        if not self._greedy.isdisjoint(rows):
            likeliest = np.fromiter(map(self._greedy.__contains__, rows), np.bool_, len(rows))
            index, greedy = np.flatnonzero(~likeliest), np.flatnonzero(likeliest)
            slots = slots[index]
        log_min_p: Tensor | None = None
        if not self._with_min_p.isdisjoint(rows):
            log_min_p = torch.from_numpy(self.columns.floors.take(slots)).to(device)[:, None]
        random = RandomRows(
            index=torch.from_numpy(index).to(device),
            streams=torch.from_numpy(self.columns.streams.take(slots)).to(device),
            inverse_temperature=torch.from_numpy(self.columns.scales.take(slots)).to(device)[:, None],
            log_min_p=log_min_p,
            plain=None,
            groups=(),
        )
        return Choice(torch.from_numpy(greedy).to(device), random)

    def _grow(self) -> None:
        size = self.columns.streams.size
        more = max(size, _FIRST_SLOTS)
        old = (self.columns.streams, self.columns.scales, self.columns.floors)
        self.columns = Columns(*(np.concatenate((column, np.zeros(more, column.dtype))) for column in old))
        self._free += range(size, size + more)
