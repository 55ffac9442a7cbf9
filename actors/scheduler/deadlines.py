"""Until when requests may wait to begin."""

from collections.abc import Container
from heapq import heapify, heappop, heappush

_SPARE = 64
"""Deadlines of requests that have ended are kept up to so many more than there are requests."""


class Deadlines:
    """Seconds on the clock of plans."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self.next: float | None = None
        """When the next waiting request may have to be dropped."""

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._heap)

    def add(self, deadline: float, request: int, open_requests: Container[int], num_open: int) -> None:
        heappush(self._heap, (deadline, request))
        if len(self._heap) > 2 * num_open + _SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in open_requests]
            heapify(self._heap)
        self.next = self._heap[0][0]

    def passed(self, now: float) -> list[int]:
        """Requests whose deadline is over, each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[1])
        self.next = self._heap[0][0] if self._heap else None
        return found
