"""How who drafts stands: counts go on when another one takes its place, what is held does not."""

from troupellm.actors.scheduler.draft_stats import ProposerCounts
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.snapshot import ProposerSnapshot


def told(life: int, *, failures: int = 0, evictions: int = 0, outputs: int = 0) -> ProposerReport:
    return ProposerReport(
        life=life,
        failures=failures,
        past_evictions=evictions,
        past_outputs=outputs,
        past_tokens=9 * outputs,
        past_tokens_capacity=128,
        memory_bytes=4000,
    )


def shown(counts: ProposerCounts) -> tuple[int, int, int]:
    snapshot = counts.snapshot()
    return snapshot.failures, snapshot.past_evictions, snapshot.past_outputs


def test_nothing_is_known_before_the_first_report() -> None:
    counts = ProposerCounts()
    assert counts.snapshot() == ProposerSnapshot()


def test_one_that_goes_on_after_a_loss_is_counted_once() -> None:
    counts = ProposerCounts()
    counts.take(told(5, failures=1, evictions=2, outputs=3))
    assert shown(counts) == (1, 2, 3)
    counts.forget()
    assert shown(counts) == (1, 2, 0)
    assert counts.snapshot().memory_bytes == 0
    counts.take(told(5, failures=1, evictions=4, outputs=3))
    assert shown(counts) == (1, 4, 3)


def test_another_one_adds_to_what_was_counted_before() -> None:
    counts = ProposerCounts()
    for life, failures in ((5, 1), (6, 0), (6, 1), (7, 1)):
        counts.take(told(life, failures=failures, evictions=10))
    assert shown(counts) == (3, 30, 0)
    assert counts.snapshot().past_tokens_capacity == 128
