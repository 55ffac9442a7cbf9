"""How who drafts stands, over all the proposers that the engine has had."""

from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.snapshot import ProposerSnapshot

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
