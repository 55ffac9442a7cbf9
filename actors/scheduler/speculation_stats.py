"""Counts the drafts of each step: for the metrics, for the requests, and in all for the snapshot."""

from collections import Counter
from itertools import accumulate

from troupellm.actors.scheduler.check_result import Aligned
from troupellm.actors.scheduler.plans_in_flight import PlanInFlight
from troupellm.actors.sequences.draft_counts import DraftCounts
from troupellm.protocol.messages.metrics import DraftStats


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
