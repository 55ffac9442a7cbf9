"""The waiting room: who is served next."""

import heapq
from itertools import count

from troupellm.actors.scheduler.sequence import Sequence
from troupellm.actors.scheduler.shares import Shares

_Key = tuple[int, int, int]


def arrival_key(policy: str, priority: int, ordinal: int, index: int) -> _Key:
    """Order of service. `ordinal` counts submissions, `index` is the sequence's place in its request.

    A preempted sequence keeps its key, so it comes back before everybody who arrived later.
    """
    return (priority if policy == "priority" else 0, ordinal, index)


class WaitingRoom:
    """Each tenant's sequences in order of their `arrival_key`, and whose turn it is.

    The line of the tenant that was served least comes first. Finding it costs O(log tenants): counters only grow, so
    an entry of the order that is out of date is too small, and is put right when it surfaces.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._lines: dict[str, _Line] = {}
        """Of those who have anybody waiting."""
        self._order: list[tuple[float, int, str]] = []
        """(counter when it was put in, tie, tenant), once per line; lines that are gone stay until they surface."""
        self._ordered: set[str] = set()
        self._ties = count()
        self._size = 0
        self.num_tokens = 0
        """Known tokens of all who wait."""

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.request.tenant)
        return line is not None and sequence.arrival_key in line.members

    def arrive(self, tenant: str) -> None:
        """To be called when a tenant's request comes, before its sequences are added."""
        if tenant not in self._lines and tenant not in self._shares.running:
            self._shares.arrive(tenant, self._lines)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            if tenant not in self._ordered:
                self._ordered.add(tenant)
                heapq.heappush(self._order, (self._shares.served(tenant), next(self._ties), tenant))
        line.add(sequence)
        self._size += 1
        self.num_tokens += len(sequence.tokens)

    def first(self) -> Sequence | None:
        """Who is next; stays in the room."""
        order = self._order
        while order:
            served, tie, tenant = order[0]
            line = self._lines.get(tenant)
            now = self._shares.served(tenant)
            if line is None:
                heapq.heappop(order)
                self._ordered.discard(tenant)
            elif now > served:
                heapq.heapreplace(order, (now, tie, tenant))
            else:
                return line.first()
        return None

    def remove(self, sequence: Sequence) -> None:
        """Idempotent."""
        tenant = sequence.request.tenant
        line = self._lines.get(tenant)
        if line is None or not line.remove(sequence):
            return
        self._size -= 1
        self.num_tokens -= len(sequence.tokens)
        if not line.members:
            del self._lines[tenant]
            if not self._lines:  # an entry must not outlive its counter, which may be forgotten while nobody waits
                self._order.clear()
                self._ordered.clear()
            elif len(self._order) > 2 * len(self._lines) + 64:
                self._order = [entry for entry in self._order if entry[2] in self._lines]
                self._ordered = {tenant for _, _, tenant in self._order}
                heapq.heapify(self._order)


class _Line:
    """One order of service. A removed entry stays in the heap until it surfaces."""

    __slots__ = ("_heap", "_ties", "members")

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int, Sequence]] = []
        self._ties = count()
        self.members: set[_Key] = set()

    def add(self, sequence: Sequence) -> None:
        if sequence.arrival_key in self.members:
            raise ValueError(f"row {sequence.row} waits already")
        self.members.add(sequence.arrival_key)
        heapq.heappush(self._heap, (sequence.arrival_key, next(self._ties), sequence))

    def first(self) -> Sequence:
        self._drop_removed()
        return self._heap[0][2]

    def remove(self, sequence: Sequence) -> bool:
        if sequence.arrival_key not in self.members:
            return False
        self.members.remove(sequence.arrival_key)
        self._drop_removed()
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = [entry for entry in self._heap if entry[0] in self.members]
            heapq.heapify(self._heap)
        return True

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0][0] not in self.members:
            heapq.heappop(self._heap)
