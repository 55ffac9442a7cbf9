"""How drafts fare: counts of the drafts of each step, and what their proposers report about themselves."""

from collections import Counter
from itertools import accumulate

from troupellm.actors.scheduler.plans import Aligned, PlanInFlight
from troupellm.actors.sequences.parts import DraftCounts
from troupellm.protocol.messages.metrics import DraftStats
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.snapshot import ProposerSnapshot


class Drafting:
    """Counts drafts of sequences that go on; drafts of ended ones count for no request."""

    def __init__(self) -> None:
        self.total = DraftCounts()

    def note(self, launched: PlanInFlight, aligned: Aligned) -> DraftStats | None:
        """Count a result's drafts; None when there were none after all."""
        taken: list[int] = []
        num_drafted = 0
        planned = zip(launched.sequences, launched.epochs, aligned.drafted, aligned.accepted, strict=True)
        for sequence, epoch, drafted, accepted in planned:
            if not drafted or sequence.epoch != epoch:
                continue
            counts = sequence.request.drafts
            if counts is None:
                counts = sequence.request.drafts = DraftCounts()
            counts.steps += 1
            counts.drafted += drafted
            counts.accepted += accepted
            taken.append(accepted)
            num_drafted += drafted
        if not taken:
            return None
        rows, num_accepted, taken_by = len(taken), sum(taken), Counter(taken)
        self.total.steps += rows
        self.total.drafted += num_drafted
        self.total.accepted += num_accepted
        most = max(taken_by)
        at_least = list(accumulate(taken_by[accepted] for accepted in range(most, 0, -1)))
        return DraftStats(rows=rows, drafted=num_drafted, accepted=num_accepted, accepted_at=tuple(reversed(at_least)))


_NOTHING = ProposerReport()


class ProposerCounts:
    def __init__(self) -> None:
        self._last = _NOTHING
        self._there = False
        """It has told of itself since a worker was lost."""
        self._failures = self._evictions = 0
        """Of the proposers before the last one."""

    def take(self, report: ProposerReport) -> None:
        if report.life != self._last.life:
            self._failures += self._last.failures
            self._evictions += self._last.past_evictions
        self._last, self._there = report, True

    def forget(self) -> None:
        """The worker was lost: what it holds is unknown until it tells again."""
        self._there = False

    def snapshot(self) -> ProposerSnapshot:
        last = self._last
        here = last if self._there else _NOTHING
        return ProposerSnapshot(
            failures=self._failures + last.failures,
            past_outputs=here.past_outputs,
            past_tokens=here.past_tokens,
            past_tokens_capacity=last.past_tokens_capacity,
            past_evictions=self._evictions + last.past_evictions,
            memory_bytes=here.memory_bytes,
        )
