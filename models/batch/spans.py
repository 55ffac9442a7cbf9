"""Cuts a step into pieces that fit into the processor's caches."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive positions of some rows of a plan, to be computed together; all int64 [rows]."""

    rows: Ints
    """Index of each row in the plan."""
    slots: Ints
    """Slot of the row in the row table."""
    starts: Ints
    """First position."""
    counts: Ints
    """Positions, at least one."""

    def pieces(self, limit: int) -> list["Spans"]:
        """The same positions in the same order, at most `limit` at a time and about equally many in each piece.

        A row that is cut finds the keys and values of its earlier positions in the cache, as with chunked prefill.
        """
        total = int(self.counts.sum())
        if total <= limit:
            return [self]
        ends = np.cumsum(self.counts)
        begins = ends - self.counts
        size = -(-total // -(-total // limit))
        found = []
        for low in range(0, total, size):
            first, last = np.maximum(begins, low), np.minimum(ends, low + size)
            inside = first < last
            starts = self.starts + first - begins
            found.append(Spans(self.rows[inside], self.slots[inside], starts[inside], (last - first)[inside]))
        return found


NO_SPANS = Spans(*(np.zeros(0, dtype=np.int64) for _ in range(4)))


def last_places(ends: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last `counts` places before each of `ends`."""
    stops = np.cumsum(counts)
    return np.arange(stops[-1]) + np.repeat(ends - stops, counts)
