"""Sequences that ask outer tiers while these change their minds, or have more than there are credits for."""

import msgspec
import pytest

from troupellm.actors.kv_offload.cost import Cost, fetch_from
from troupellm.actors.kv_offload.transfers import OUTER
from troupellm.protocol.config.kv_connectors import FailurePolicy
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierInfo, TierLookup, TierReport
from troupellm.tests.support.engines.inside import offload_of
from troupellm.tests.support.scheduler.oracle import stream_of, submission
from troupellm.tests.support.scheduler.tier_oracle import TierHarness, tiered_ready

PROMPT = [number % 6 + 1 for number in range(4 * (OUTER + 16) + 1)]
"""More blocks of 4 than may be under way from one tier."""
BLOCKS = len(PROMPT) // 4


class Late:
    """An engine whose disk and peer have the prompt's blocks, and answer look-ups as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: FailurePolicy = "recompute") -> None:
        first = self._harness(policy)
        first.submit(submission(1, PROMPT, max_tokens=2))
        first.run()
        self.harness = self._harness(policy)
        tiers = self.harness.oracle.tiers
        for number in (0, 1):
            tiers.outer[number] = dict(first.oracle.tiers.outer[number])
            assert len(tiers.outer[number]) >= BLOCKS
        self.silent: set[int] = set()
        """Tiers that do not answer look-ups."""
        monkeypatch.setattr(tiers, "answers", self._answers)

    def ask(self) -> None:
        """Submit the request beside a running one, so that no step waits for a tier."""
        self.harness.submit(submission(8, [3, 3], max_tokens=60))
        self.harness.submit(submission(9, PROMPT, max_tokens=4))

    def finish(self) -> int:
        """Tokens that came from tiers."""
        self.silent.clear()
        self.harness.run()
        self.harness.assert_idle()
        assert self.harness.reader.closed[9].error is None
        assert self.harness.reader.streams[900] == stream_of(PROMPT, 0, 4, frozenset())
        sources = self.harness.reader.closed[9].usage.cached_sources
        return sources.disk + sources.external

    def _answers(self, lookup: TierLookup) -> bool:
        return lookup.tier not in self.silent

    def _harness(self, policy: FailurePolicy) -> TierHarness:
        settings = tiered_ready(2 * BLOCKS, num_blocks=2 * BLOCKS, block_size=4, max_model_len=len(PROMPT) + 8)
        tiers = (TierInfo(name="disk"), TierInfo(name="peer", failure_policy=policy))
        config = OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload", kv_offload_timeout=20.0)
        return TierHarness(msgspec.structs.replace(settings, tiers=tiers), config)


@pytest.mark.parametrize("tier", [1, 2])
def test_a_tier_that_is_left_alone_while_another_is_waited_for(monkeypatch: pytest.MonkeyPatch, tier: int) -> None:
    late = Late(monkeypatch)
    late.silent = {3 - tier}
    late.ask()
    for _ in range(3):
        late.harness.step()
    late.harness.oracle.reports.append(TierReport(tier=tier, disabled="No space left on device"))
    late.harness.step()
    assert late.finish() == 4 * BLOCKS, "the other one has them too"


def test_a_tier_that_is_left_alone_as_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    late.harness.oracle.tiers.outer[1].clear()
    late.harness.oracle.reports.append(TierReport(tier=1, disabled="No space left on device"))
    late.ask()
    assert late.finish() == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_sequence_that_waited_for_a_silent_tier_has_time_to_load_from_another(
    monkeypatch: pytest.MonkeyPatch, policy: FailurePolicy
) -> None:
    late = Late(monkeypatch, policy)
    tiers = late.harness.oracle.tiers
    tiers.outer[0].clear()
    late.silent = {1}
    begun: set[int] = set()

    def ends(order: BlockTransfer) -> bool:
        """Fetches take a step more than others."""
        at_once = order.kind != "fetch" or order.transfer in begun
        begun.add(order.transfer)
        return at_once

    monkeypatch.setattr(tiers, "ends", ends)
    late.ask()
    for _ in range(9):
        late.harness.step()
    assert late.harness.core.snapshot().offload.timeouts == 1
    assert late.finish() == 4 * BLOCKS
    assert late.harness.core.snapshot().offload.timeouts == 1


def test_a_request_behind_an_aborted_one_uses_the_fetches_that_it_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Late(monkeypatch)
    harness, held = late.harness, {"fetch"}
    monkeypatch.setattr(harness.oracle.tiers, "ends", lambda order: order.kind not in held)
    late.ask()
    for _ in range(2):
        harness.step()
    assert harness.oracle.tiers.counts["fetch"] > 1
    harness.abort(9)
    harness.submit(submission(10, PROMPT, max_tokens=4))
    harness.step()
    held.clear()
    harness.run()
    harness.assert_idle()
    closed = harness.reader.closed[10]
    assert closed.error is None
    assert harness.reader.streams[1000] == stream_of(PROMPT, 0, 4, frozenset())
    sources = closed.usage.cached_sources
    assert sources.disk + sources.external == 4 * BLOCKS, "what was given up was there all the time"


def test_costs_never_measured_are_measured_and_remembered() -> None:
    cost = Cost("auto", 4, 1, lambda: 0.001)
    cost.learn("store", 1.0)
    assert not cost.offload_pays()
    cost.not_done("store", "load", fetch_from(1))
    cost.learn("load", 0.005)
    cost.learn(fetch_from(1), 0.005)
    assert not cost.load_pays()
    assert not cost.fetch_pays(1)


def test_the_recompute_mode_never_measures_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiered_ready(64, num_blocks=9, block_size=4, max_model_len=32)
    harness = TierHarness(settings, OffloadConfig(kv_offloading_size=1.0, preemption_mode="recompute"))
    cost = offload_of(harness.core).cost
    monkeypatch.setattr(cost, "not_done", lambda *kinds: pytest.fail(f"{kinds} were never to be done"))
    for number in (1, 2, 3):
        harness.submit(submission(number, [number] * 6, max_tokens=20))
    harness.run()
    assert harness.core.snapshot().preemptions > 0
