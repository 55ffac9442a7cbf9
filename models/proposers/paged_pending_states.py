"""Hidden states whose entries a drafter has yet to make; a row that drafts nothing for a while may have many."""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from troupellm.models.batch.host_device import to_device
from troupellm.models.proposers.paged_attention import Ints

CAPACITY: Final = 24
"""Most states of a row: those of a usual block and the drafts of a step."""
KEPT: Final = CAPACITY + 1
"""States of a row that are kept between steps."""


class PendingStates:
    """By slot, the states of consecutive positions.

    Attributes:
        starts: int64 [slots], position of the first one.
        counts: int64 [slots].
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.empty(0, CAPACITY, width, dtype=dtype, device=device)
        self.starts: Ints = np.zeros(0, dtype=np.int64)
        self.counts: Ints = np.zeros(0, dtype=np.int64)

    def grow(self, slots: int) -> None:
        """Make room for this many slots."""
        more = slots - self.counts.size
        if more > 0:
            self.starts, self.counts = (np.pad(part, (0, more)) for part in (self.starts, self.counts))
            self._states = torch.cat((self._states, self._states.new_zeros(more, *self._states.shape[1:])))

    def restart(self, slots: Ints, starts: Ints) -> None:
        """Discard the states of some rows, which continue from the given positions."""
        self.starts[slots], self.counts[slots] = starts, 0

    def takes(self, slots: Ints, counts: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for rows [rows] that have room for this many more states."""
        room: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.counts[slots] + counts <= CAPACITY
        return room

    def append(self, slots: Ints, counts: Ints, states: Tensor) -> None:
        """states: [sum of counts, width], row after row."""
        owner, place = _flat(slots, counts)
        self._states[self._index(owner, place + np.repeat(self.counts[slots], counts))] = states
        self.counts[slots] += counts

    def of(self, slots: Ints) -> Tensor:
        """All that is kept of some rows [sum of their counts, width]."""
        return self._states[self._index(*_flat(slots, self.counts[slots]))]

    def _index(self, slots: Ints, places: Ints) -> tuple[Tensor, Tensor]:
        device = self._states.device
        return to_device(slots, device), to_device(places, device)


def _flat(slots: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """For each state of each row: the row's slot, and the state's number 0, 1, 2, ..."""
    ends = np.cumsum(counts)
    place = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return np.repeat(slots, counts), place
