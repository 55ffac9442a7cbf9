"""What steps with drafts take by the wall, beside what their thread computes.

A thread's own time is the same on a busy machine as on a quiet one, so that costs are compared by it. It does not see
what drafts cost others: the threads that help, the memory that all read, whoever takes in what came of them. So the
time between the ends of two steps is looked at, too: how many times that of the thread it is with drafts, and without.
"""

from collections import deque
from statistics import median
from typing import Final

_KEPT: Final = 9
"""Steps of each kind whose median counts: what a machine does to less than half of them does not matter."""
_PLAIN, _DRAFTING = 2, 3
"""As many are needed."""
_MOST: Final = 3.0


class WallPrice:
    """Of steps with so many rows.

    Attributes:
        factor: by which drafts make a step longer than its thread sees, at least 1.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._drafting: deque[float] = deque(maxlen=_KEPT)

    def learn(self, period: float, seconds: float, *, drafts: bool) -> None:
        """A step ended so long after the one before it, and took so much of its thread; seconds."""
        (self._drafting if drafts else self._plain).append(period / max(seconds, 1e-9))
        if len(self._plain) >= _PLAIN and len(self._drafting) >= _DRAFTING:
            self.factor = min(max(median(self._drafting) / max(median(self._plain), 1e-9), 1.0), _MOST)

    def relax(self) -> None:
        """It is long ago: half as much is believed until drafts are tried again."""
        self.factor **= 0.5
        self._plain.clear()
        self._drafting.clear()
