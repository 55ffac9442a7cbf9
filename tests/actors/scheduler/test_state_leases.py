"""Leases and tiers of models with states: a kept prefix has its snapshot, and blocks without one are not asked for."""

import msgspec
import pytest

from troupellm.actors.kv_cache.state_slots import StateSlots
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, LeaseConfig, PrefetchSession, PrefixLease
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.messages.kv_transfers import TierInfo
from troupellm.tests.support.scheduler.oracle import SECRET, Harness, ready, stream_of, submission
from troupellm.tests.support.scheduler.tier_oracle import TierHarness, tiered_ready

PROMPT = [1 + number % 7 for number in range(42)]
NEVER: frozenset[int] = frozenset()


class Agents:
    """Requests of two tenants to a model with few slots for snapshots."""

    def __init__(self, fraction: float = 0.5, slots: int = 6) -> None:
        settings = ready(num_blocks=128, block_size=4, max_model_len=96, state_slots=slots)
        config = SchedulerConfig(max_plans_in_flight=1, state_snapshot_interval=0)
        leases = LeaseConfig(kv_lease_fraction=fraction, tool_lease=1000.0)
        core = SchedulerCore(config, settings, enable_prefix_caching=True, hash_key=SECRET, leases=leases)
        self.harness, self._number = Harness(core, settings), 0

    def turn(self, prompt: list[int], *, answer: int = 1, **hints: object) -> int:
        """Tokens of the prompt that were found."""
        self._number += 1
        self.harness.submit(submission(self._number, prompt, max_tokens=answer, **hints))
        self.harness.run()
        assert self.harness.reader.streams[100 * self._number] == stream_of(prompt, 0, answer, NEVER)
        return self.harness.reader.closed[self._number].usage.cached_tokens

    def flood(self, prompts: int = 8) -> None:
        for number in range(prompts):
            self.turn([20 + number, *PROMPT[:20]], tenant="other")


@pytest.mark.parametrize(("fraction", "found"), [(0.5, 24), (0.0, 0)])
def test_the_snapshot_of_a_marked_prefix_survives_a_flood(fraction: float, found: int) -> None:
    made = Agents(fraction)
    made.turn(PROMPT, leases=(PrefixLease(26, 1000.0),))
    made.flood()
    assert made.turn([*PROMPT[:26], *[9] * 12]) == found


def test_a_lease_of_a_snapshot_ends_by_the_schedulers_clock() -> None:
    made = Agents()
    made.turn(PROMPT, leases=(PrefixLease(26, 5.0),))
    made.harness.now += 100.0
    made.flood()
    assert made.turn([*PROMPT[:26], *[9] * 12]) == 0


def test_the_state_of_a_kept_turn_survives_within_a_block() -> None:
    made = Agents()
    made.turn(PROMPT, answer=4, session="s", tenant="one")
    made.harness.core.leases.handle(KeepTurn("one", "s"))
    made.flood()
    grown = [*PROMPT, *stream_of(PROMPT, 0, 4, NEVER)]
    assert made.turn([*grown, 1, 2, 3, 4], tenant="one", session="s") == len(grown) - 1


def test_a_dropped_session_lends_its_snapshots_to_others() -> None:
    made = Agents()
    made.turn(PROMPT, session="s", tenant="one")
    made.harness.core.leases.handle(KeepTurn("one", "s"))
    made.harness.core.leases.handle(DropSession("one", "s", lambda _: None))
    made.flood()
    assert made.turn(PROMPT, tenant="one") == 0


def test_sequences_go_on_when_all_snapshots_are_leased() -> None:
    made = Agents(fraction=1.0, slots=3)
    for number in range(5):
        made.turn([30 + number, *PROMPT[:20]], leases=(PrefixLease(20, 1e6),), tenant="one")
    made.harness.assert_idle()
    made.flood(3)


def test_a_use_renews_the_lease_of_a_snapshot_and_the_oldest_gives_way() -> None:
    slots = StateSlots(3)
    slots.leased.fraction = 1.0
    slots.leased.begin(3)
    for name in (b"first", b"second", b"third"):
        slots.keep(slots.take(), name, b"")
        slots.lease("key", name, 60.0)
        slots.leased.now += 1.0
    slots.leased.now = 50.0
    ((_, found),) = slots.tails(b"first", b"")
    slots.release(slots.take(found))
    assert [slots.has(name) for name in (b"first", b"second", b"third")] == [True, False, True]
    slots.leased.now = 100.0  # the third one's lease has run out, the first one's has not
    slots.take(), slots.take()
    assert [slots.has(name) for name in (b"first", b"third")] == [True, False]
    assert slots.leased.ends["expired"] == 1


def tiered(*, slots: int) -> TierHarness:
    settings = tiered_ready(64, num_blocks=64, block_size=4, max_model_len=96)
    settings = msgspec.structs.replace(settings, tiers=(TierInfo(name="disk"),), state_slots=slots)
    config = OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload")
    return TierHarness(settings, config)


def test_blocks_without_a_snapshot_are_not_fetched() -> None:
    first = tiered(slots=8)
    first.submit(submission(1, PROMPT, max_tokens=2))
    first.run()
    harness = tiered(slots=8)
    harness.oracle.tiers.outer[0] = dict(first.oracle.tiers.outer[0])
    assert len(harness.oracle.tiers.outer[0]) >= len(PROMPT) // 4
    harness.submit(submission(2, PROMPT, max_tokens=4, session="s"))
    harness.run()
    assert [lookup for plan in harness.plans for lookup in plan.lookups] == []
    assert harness.reader.streams[200] == stream_of(PROMPT, 0, 4, NEVER)


def test_blocks_before_a_snapshot_come_back_from_a_tier() -> None:
    harness = tiered(slots=8)
    harness.submit(submission(1, PROMPT, max_tokens=4))
    harness.run()
    states = harness.core.snapshot().states
    assert states is not None
    assert states.snapshots > 0
    for number in range(12):
        harness.submit(submission(10 + number, [20 + number, *PROMPT], max_tokens=4, tenant="other"))
    harness.run()
    harness.submit(submission(40, PROMPT, max_tokens=4))
    harness.run()
    assert harness.reader.streams[4000] == stream_of(PROMPT, 0, 4, NEVER)


def test_a_prefetch_says_that_blocks_without_a_snapshot_are_missing() -> None:
    made = Agents(slots=3)
    made.turn(PROMPT, session="s", tenant="one")
    for number in range(4):
        made.turn([20 + number, *PROMPT[:20]], tenant="other")
    reports: list[object] = []
    made.harness.core.leases.handle(PrefetchSession("one", "s", reports.append))
    assert [(report.present, report.missing) for report in reports] == [(0, len(PROMPT) // 4)]
