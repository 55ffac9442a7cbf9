"""Chooses the sequence that gives up its blocks, where another one needs them or is owed a fair share."""

from collections.abc import Mapping

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.sequences.sequence import Sequence

SEARCH_STEPS = 16
"""Steps that a beam search gets before it makes room for another tenant."""


class Victims:
    def __init__(
        self,
        running: Mapping[int, Sequence],
        paused: Mapping[int, Sequence],
        loading: Mapping[int, Sequence],
        fair_share: FairShare,
    ) -> None:
        """Sequences by row, as `RunningSet` moves them."""
        self._running = running
        self._paused = paused
        self._loading = loading
        self._fair_share = fair_share

    def next(self) -> Sequence | None:
        """The sequence that gives up blocks next: paused readers before others, then the tenant that was served most,
        then the newest. The oldest running request is preempted only for itself: two beam searches that preempted each
        other in turns would never finish.
        """
        if self._paused:
            return max(self._paused.values(), key=self.age)
        first = self.first_to_come()
        if first is None:
            return None
        kept = first.request.sequences if first.is_beam else (first,)
        candidates = [sequence for sequence in self._running.values() if sequence not in kept]
        candidates += [sequence for sequence in self._loading.values() if sequence.capacity]
        return max(candidates or self._running.values(), key=self.age)

    def first_to_come(self) -> Sequence | None:
        """The oldest running sequence."""
        return min(self._running.values(), key=lambda sequence: sequence.arrival_key, default=None)

    def in_the_way(self, waiting: Sequence) -> Sequence | None:
        """The sequence that makes room for the first of the waiting queue: the newest of the tenant that runs most.

        None unless a tenant runs more than its fair share; otherwise the preempted request could ask for its room back.
        A beam is chosen only if there is no other sequence: all of its search goes with it, which leaves its tenant
        with less than a share and the step undone. A search makes some steps first, or searches take turns forever.
        """
        fair_share, tenant = self._fair_share, waiting.request.tenant
        coming = sum(1 for other in self._loading.values() if other.capacity and other.request.tenant == tenant)
        after = fair_share.rows(tenant) + (1 + coming) * fair_share.row_share(tenant)
        others = set(fair_share.running) - {tenant}
        above = {name for name in others if fair_share.rows(name) - fair_share.row_share(name) >= after}
        if not above:
            return None
        able = [s for s in self._running.values() if s.request.tenant in above]
        candidates = [s for s in able if not s.is_beam] or [s for s in able if _has_had_its_turn(s)]
        return max(candidates, key=lambda s: (fair_share.rows(s.request.tenant), self.age(s)), default=None)

    def age(self, sequence: Sequence) -> tuple[float, tuple[int, int, int]]:
        """Greater gives way first."""
        return self._fair_share.served(sequence.request.tenant), sequence.arrival_key


def _has_had_its_turn(beam: Sequence) -> bool:
    search = beam.request.search
    return search is not None and search.num_steps >= SEARCH_STEPS
