"""The waiting queue: who is served next."""

import heapq
from collections.abc import Iterable
from itertools import count

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.sequences.sequence import Sequence

_Key = tuple[int, int, int]


def arrival_key(policy: str, priority: int, ordinal: int, index: int) -> _Key:
    """Order of service. `ordinal` counts submissions, `index` is the sequence's place in its request.

    A preempted sequence keeps its key, so it comes back before everybody who arrived later.
    """
    return (priority if policy == "priority" else 0, ordinal, index)


class WaitingQueue:
    """Each tenant's sequences in order of their `arrival_key`, and whose turn it is.

    The line of the tenant that was served least comes first. Finding it costs O(log tenants): where a counter has
    grown, an entry of the order is too small, and is put right when it surfaces; where a promise has ended, the counter
    gets another entry, and the greater one is dropped when it surfaces.
    """

    def __init__(self, fair_share: FairShare) -> None:
        self._fair_share = fair_share
        self._lines: dict[str, _Line] = {}
        """Of those who have anybody waiting."""
        self._order: list[tuple[float, int, str]] = []
        """(counter when it was put in, tie, tenant); lines that are gone stay until they surface."""
        self._ordered: dict[str, float] = {}
        """The counter of a tenant's entry that counts."""
        self._away: dict[Sequence, int] = {}
        """Sequences that wait for outer tiers, and the tokens that each would compute without them."""
        self._ties = count()
        self._size = 0
        self.num_tokens = 0
        """Known tokens of all who wait."""

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.request.tenant)
        return line is not None and sequence.arrival_key in line.members

    @property
    def num_away(self) -> int:
        """Sequences that have gone out for a while."""
        return len(self._away)

    def arrive(self, tenant: str, loading: Iterable[str] = ()) -> None:
        """To be called when a tenant's request comes, before its sequences are added.

        Args:
            loading: tenants of sequences that neither wait here nor run, but soon will.
        """
        waiting = {*self._lines, *loading} if loading else self._lines.keys()
        if tenant not in waiting and tenant not in self._fair_share.running:
            self._fair_share.arrive(tenant, waiting)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self._put_in_order(tenant)
        line.add(sequence)
        self._size += 1
        self.num_tokens += len(sequence.tokens)

    def first(self) -> Sequence | None:
        """The next sequence; stays in the queue."""
        order = self._order
        while order:
            served, tie, tenant = order[0]
            line = self._lines.get(tenant)
            now = self._fair_share.served(tenant)
            if self._ordered.get(tenant) != served:
                heapq.heappop(order)
            elif line is None:
                heapq.heappop(order)
                del self._ordered[tenant]
            elif now > served:
                self._ordered[tenant] = now
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
            if not self._lines:  # an entry must not outlive its counter, which may be forgotten while the room is empty
                self._order.clear()
                self._ordered.clear()
            else:
                self._bound_order()

    def go_out(self, sequence: Sequence, tokens: int) -> None:
        """A sequence's turn has come, and it asks outer tiers first: meanwhile it is the turn of other tenants."""
        self.remove(sequence)
        self._away[sequence] = tokens
        self._fair_share.promise(sequence.request.tenant, tokens)

    def come_back(self, sequence: Sequence) -> None:
        """It waits for them no longer; it is not in the queue again yet. Idempotent."""
        tokens = self._away.pop(sequence, 0)
        if tokens:
            tenant = sequence.request.tenant
            self._fair_share.promise(tenant, -tokens)
            if tenant in self._lines:
                self._put_in_order(tenant)

    def _put_in_order(self, tenant: str) -> None:
        served, entered = self._fair_share.served(tenant), self._ordered.get(tenant)
        if entered is None or served < entered:
            self._ordered[tenant] = served
            heapq.heappush(self._order, (served, next(self._ties), tenant))
            self._bound_order()

    def _bound_order(self) -> None:
        if len(self._order) > 2 * len(self._lines) + 64:
            counting = {entry[2]: entry for entry in self._order if self._ordered.get(entry[2]) == entry[0]}
            self._order = [entry for tenant, entry in counting.items() if tenant in self._lines]
            self._ordered = {tenant: served for served, _, tenant in self._order}
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
