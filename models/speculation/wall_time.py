"""Compares wall-clock times of steps with the processor time of their thread, with and without drafts.

A thread's own time is the same on a busy machine as on a quiet one, so costs are compared by it. It does not show the
drafts' effect on others: helper threads, shared memory bandwidth, and the receivers of results. So the time between the
ends of two steps is measured, too, as a multiple of the thread's time, once with drafts and once without.
"""

from collections import deque
from statistics import median
from typing import Final

_KEPT: Final = 9
"""Steps of each kind whose median counts: disturbances of fewer than half of them do not matter."""
_PLAIN, _DRAFTING = 2, 3
"""As many are needed."""
_MOST: Final = 3.0


class WallTimeOverhead:
    """The price for steps with one number of rows.

    Attributes:
        factor: by which drafts make a step longer than its thread sees, at least 1.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._drafting: deque[float] = deque(maxlen=_KEPT)

    def learn(self, period: float, seconds: float, *, drafts: bool) -> None:
        """Take in a step: the time since the end of the one before it, and its thread's time; seconds."""
        (self._drafting if drafts else self._plain).append(period / max(seconds, 1e-9))
        if len(self._plain) >= _PLAIN and len(self._drafting) >= _DRAFTING:
            self.factor = min(max(median(self._drafting) / max(median(self._plain), 1e-9), 1.0), _MOST)

    def relax(self) -> None:
        """After a long sleep: halve the known extra cost until drafts are tried again."""
        self.factor **= 0.5
        self._plain.clear()
        self._drafting.clear()
