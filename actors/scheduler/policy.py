"""The waiting room: who is served next."""

import heapq
from itertools import count

from troupellm.actors.scheduler.sequence import Sequence


def arrival_key(policy: str, priority: int, ordinal: int, index: int) -> tuple[int, int, int]:
    """Order of service. `ordinal` counts submissions, `index` is the sequence's place in its request.

    A preempted sequence keeps its key, so it comes back before everybody who arrived later.
    """
    return (priority if policy == "priority" else 0, ordinal, index)


class WaitingRoom:
    """Sequences in order of their `arrival_key`. A removed entry stays in the heap until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._ties = count()
        self._members: set[tuple[int, int, int]] = set()
        self.num_tokens = 0
        """Known tokens of all who wait."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.arrival_key in self._members

    def add(self, sequence: Sequence) -> None:
        if sequence.arrival_key in self._members:
            raise ValueError(f"row {sequence.row} waits already")
        self._members.add(sequence.arrival_key)
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heap, (sequence.arrival_key, next(self._ties), sequence))

    def first(self) -> Sequence | None:
        """Who is next; stays in the room."""
        self._drop_removed()
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Idempotent."""
        if sequence.arrival_key not in self._members:
            return
        self._members.remove(sequence.arrival_key)
        self.num_tokens -= len(sequence.tokens)
        self._drop_removed()
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[0] in self._members]
            heapq.heapify(self._heap)

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
