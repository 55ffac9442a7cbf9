"""A reset of the prefix cache with tiers: no older block is found, also when transfers are under way."""

import pytest

from tests.actors.kv_offload.test_uses import PROMPT, ask, finished, harness_of, usage
from troupellm.protocol.messages.kv_transfers import TierReport
from troupellm.protocol.messages.scheduler import WorkerLost


def test_a_reset_hides_what_every_tier_has() -> None:
    harness = harness_of(("disk", "peer"))
    ask(harness, 1, PROMPT)
    harness.run()
    harness.core.reset_prefix_cache()
    ask(harness, 2, PROMPT)
    harness.run()
    assert usage(harness, 2).cached_sources.external == 16, "what engines share is theirs"
    harness.core.reset_prefix_cache(external=True)
    ask(harness, 3, PROMPT)
    harness.run()
    assert usage(harness, 3).cached_tokens == 0
    ask(harness, 4, PROMPT)
    harness.run()
    assert usage(harness, 4).cached_sources.device == 16
    finished(harness, 4, PROMPT)


def test_a_reset_holds_for_other_engines_of_the_same_stores_and_says_when() -> None:
    harness, said = harness_of(("disk", "peer")), []
    ask(harness, 1, PROMPT)
    harness.run()
    harness.core.reset_prefix_cache(external=True, done=said.append)
    assert said == []
    harness.run()
    assert said == [True]
    assert harness.oracle.tiers.outer == [{}, {}]
    ask(harness, 2, PROMPT)
    harness.run()
    assert usage(harness, 2).cached_tokens == 0
    later = harness_of(("disk", "peer"))
    later.oracle.tiers.outer = harness.oracle.tiers.outer
    ask(later, 1, PROMPT)
    later.run()
    assert usage(later, 1).cached_sources.disk == 16, "names are the same ones for all"


def test_a_tier_that_cannot_be_reset_is_not_used_before_it_has_been() -> None:
    harness, said = harness_of(("disk",)), []
    ask(harness, 1, PROMPT)
    harness.run()
    harness.oracle.failing = 1.0
    harness.oracle.reports.append(TierReport(tier=1, disabled="sick"))
    harness.core.reset_prefix_cache(done=said.append)
    harness.run()
    assert said == [False]
    harness.oracle.failing = 0.0
    looked, before = harness.oracle.tiers.counts["reset"], len(harness.plans)
    ask(harness, 2, PROMPT)
    harness.run()
    assert usage(harness, 2).cached_tokens == 0
    assert not any(plan.lookups for plan in harness.plans[before:])
    assert not any(order.tier for plan in harness.plans[before:] for order in plan.transfers)
    harness.oracle.reports.append(TierReport(tier=1))
    ask(harness, 3, [9] * 5)
    harness.run()
    assert harness.oracle.tiers.counts["reset"] == looked + 1
    ask(harness, 4, [8] * 17)
    harness.run()
    assert len(harness.oracle.tiers.outer[0]) >= 4


def test_a_reset_that_the_worker_took_along_is_asked_for_again() -> None:
    harness, said = harness_of(("disk",)), []
    ask(harness, 1, PROMPT)
    harness.run()
    harness.core.reset_prefix_cache(done=said.append)
    harness.core.reset_prefix_cache(done=said.append)
    harness.core.lose_worker(WorkerLost("killed", fault=False))
    assert said == [False, False]
    harness.core.reset_prefix_cache(done=said.append)
    assert said == [False, False, False], "nobody hears of it now"
    harness.oracle.reset()
    harness.core.worker_restarted(harness.core._ready)
    assert harness.oracle.tiers.outer[0], "nobody has reset it yet"
    ask(harness, 2, PROMPT)
    harness.run()
    assert usage(harness, 2).cached_tokens == 0


@pytest.mark.parametrize("disabled", ["", "sick"])
def test_a_reset_while_nothing_is_planned_is_promised_of_tiers_that_work(disabled: str) -> None:
    harness, said = harness_of(("disk",)), []
    ask(harness, 1, PROMPT)
    harness.run()
    harness.oracle.reports.append(TierReport(tier=1, disabled=disabled))
    ask(harness, 2, PROMPT)
    harness.run()
    assert harness.oracle.tiers.outer[0]
    harness.core.pause_control.begin(lambda still: None, finish=False)
    harness.core.reset_prefix_cache(done=said.append)
    assert said == [not disabled]
    assert harness.core.plan(harness.now) is None
    harness.core.go_on()
    harness.run()
    assert harness.oracle.tiers.counts["reset"] == 1
    assert not harness.oracle.tiers.outer[0]
