"""The probability that drafts are kept, by row and by depth, estimated from earlier drafts."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROW_MEMORY: Final = 0.9
"""Weight of an observation of a row after its next one: a text changes its kind within some ten steps."""
_MEMORY: Final = 0.95
"""The same factor for all rows together, by steps."""
_STRENGTH: Final = 2.0
"""Number of observations that weigh as much as the average over the other rows, or other depths."""
_ROW_STRENGTH: Final = 4.0
"""The same number for one row: a few bad guesses do not mean that its text is of another kind."""
_FIRST_RATE: Final = 0.7
_MOST_POOLED: Final = 4.0
"""Observations of a row, at any depth, up to which its own mean counts at depths where it has none."""


class AcceptanceRates:
    """Counts that fade, per row (by slot) and of all rows.

    At each depth, 0 being the first draft of a chain or the first level of a tree: how often it was reached, that is
    asked for and everything before it kept; how often its draft was there and kept; how often it was asked for at all,
    and there.
    """

    def __init__(self, depths: int) -> None:
        self._depths = np.arange(depths)
        self._rows = np.zeros((0, 4, depths))
        self._all = np.zeros((4, depths))

    def forget(self, slot: int) -> None:
        """Another row comes into a slot."""
        if slot >= self._rows.shape[0]:
            grown = np.zeros((max(16, 2 * slot), *self._rows.shape[1:]))
            grown[: self._rows.shape[0]] = self._rows
            self._rows = grown
        self._rows[slot] = 0.0

    def seen(self, slots: Ints) -> Floats:
        """Observations of rows [n], faded."""
        found: Floats = self._rows[slots, 2, 0]
        return found

    def learn(self, slots: Ints, asked: Ints, offered: Ints, kept: Ints, steps: int) -> None:
        """Of rows [n], which may come several times: depths asked for, those with a draft, those whose draft was kept.

        Args:
            steps: in which that was.
        """
        depths, (asked, offered, kept) = self._depths, (each[:, None] for each in (asked, offered, kept))
        counts = np.stack(
            (
                (depths < asked) & (depths <= kept),
                depths < np.minimum(kept, asked),
                depths < asked,
                depths < np.minimum(offered, asked),
            ),
            axis=1,
        ).astype(np.float64)
        times = np.bincount(slots)
        present = np.flatnonzero(times)
        self._rows[present] *= (_ROW_MEMORY ** times[present])[:, None, None]
        np.add.at(self._rows, slots, counts)
        self._all *= _MEMORY**steps
        self._all += counts.mean(axis=0) * steps

    def of_new(self) -> tuple[Floats, Floats]:
        """[depths] of a row of which nothing is known: the probability that a draft is kept if those before it are, and
        that there is one at all."""
        reached, kept, asked, offered = self._all
        pooled = (kept.sum() + _STRENGTH * _FIRST_RATE) / (reached.sum() + _STRENGTH)
        return (kept + _STRENGTH * pooled) / (reached + _STRENGTH), (offered + _STRENGTH) / (asked + _STRENGTH)

    def of(self, slots: Ints) -> tuple[Floats, Floats]:
        """[rows, depths] as `of_new`, of known rows."""
        rate, present = self.of_new()
        reached, kept, asked, offered = np.moveaxis(self._rows[slots], 1, 0)
        total = reached.sum(axis=1, keepdims=True)
        weight = np.minimum(total, _MOST_POOLED)
        mean = kept.sum(axis=1, keepdims=True) / np.maximum(total, 1e-9)
        prior = (_STRENGTH * rate + weight * mean) / (_STRENGTH + weight)
        return (kept + _ROW_STRENGTH * prior) / (reached + _ROW_STRENGTH), (
            (offered + _ROW_STRENGTH * present) / (asked + _ROW_STRENGTH)
        )
