"""The uses of the tiers, one by one, and their cost when a transfer fails."""

import pytest

from troupellm.actors.kv_offload.cost import fetch_from
from troupellm.actors.kv_offload.transfers import LOADS
from troupellm.actors.sequences.sequence import State
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.messages.kv_transfers import STORES, TierReport
from troupellm.tests.support.engines.inside import ledger_of, offload_of, set_prompt_cost, shares_of
from troupellm.tests.support.scheduler.oracle import stream_of, submission
from troupellm.tests.support.scheduler.tier_oracle import TierHarness, tiered_ready

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
"""Four full blocks of 4, and a token."""


def harness_of(
    outer: tuple[str, ...] = (),
    *,
    places: int = 32,
    mode: str = "offload",
    threshold: int = 0,
    plans: int = 1,
    rows: int = 4,
    windows: tuple[int | None, ...] = (None,),
    timeout: float = 20.0,
    **tiers: object,
) -> TierHarness:
    settings = tiered_ready(places, outer, num_blocks=10, block_size=4, max_model_len=40, windows=windows)
    config = OffloadConfig(
        kv_offloading_size=1.0, preemption_mode=mode, kv_offload_store_threshold=threshold, kv_offload_timeout=timeout
    )
    limits = {"max_num_seqs": rows, "max_plans_in_flight": plans}
    return TierHarness(settings, config, limits, **tiers)


def ask(harness: TierHarness, number: int, prompt: list[int], max_tokens: int = 4) -> None:
    harness.submit(submission(number, prompt, max_tokens=max_tokens))


def push_out(harness: TierHarness, number: int) -> None:
    """Have everything else leave the device."""
    ask(harness, number, [7] * 35)
    harness.run()


def usage(harness: TierHarness, number: int) -> object:
    return harness.reader.closed[number].usage


def finished(harness: TierHarness, number: int, prompt: list[int], max_tokens: int = 4) -> None:
    assert harness.reader.streams[100 * number] == stream_of(prompt, 0, max_tokens, frozenset())


def waiting_for_host() -> TierHarness:
    """Request 3 waits for blocks from a host tier that does not answer."""
    harness = harness_of()
    ask(harness, 1, PROMPT)
    harness.run()
    push_out(harness, 2)
    harness.oracle.silent = True
    ask(harness, 3, PROMPT)
    return harness


def out_and_back(harness: TierHarness) -> None:
    ask(harness, 1, PROMPT)
    harness.run()
    push_out(harness, 2)
    ask(harness, 3, PROMPT)


def test_blocks_that_left_the_device_come_back_from_host_memory() -> None:
    harness = harness_of()
    out_and_back(harness)
    harness.run()
    finished(harness, 3, PROMPT)
    sources = usage(harness, 3).cached_sources
    assert (sources.device, sources.host, sources.disk, sources.external) == (0, 16, 0, 0)
    assert usage(harness, 3).cached_tokens == 16
    host = harness.core.snapshot().offload.tiers[0]
    assert (host.name, host.loads, host.evictions) == ("host", 4, 0)
    harness.assert_idle()


def test_groups_with_windows_load_only_what_is_seen() -> None:
    harness = harness_of(windows=(None, 5))
    out_and_back(harness)
    before = harness.oracle.tiers.counts.get("load", 0)
    harness.run()
    finished(harness, 3, PROMPT)
    assert usage(harness, 3).cached_sources.host == 16
    assert harness.oracle.tiers.counts["load"] - before == 4 + 1  # behind 16 positions a token sees 4 of them
    harness.assert_idle()


@pytest.mark.parametrize("windows", [(5,), (5, 6)])
def test_the_source_of_cached_tokens_is_where_the_window_blocks_came_from(windows: tuple[int, ...]) -> None:
    harness = harness_of(windows=windows)
    out_and_back(harness)
    harness.run()
    finished(harness, 3, PROMPT)
    sources = usage(harness, 3).cached_sources
    assert (sources.device, sources.host) == (0, 16)
    shown = harness.core.snapshot()
    assert (shown.prefix_hits, shown.offload.hit_tokens) == (0, 16)
    ask(harness, 4, PROMPT)
    harness.run()
    sources = usage(harness, 4).cached_sources
    assert (sources.device, sources.host) == (16, 0)
    assert harness.core.snapshot().prefix_hits == 16
    harness.assert_idle()


def test_a_loading_sequence_lets_others_go_on() -> None:
    harness = harness_of(speed=0.0)
    harness.oracle.speed = 1.0
    out_and_back(harness)
    harness.oracle.speed = 0.0
    ask(harness, 4, [8, 8])
    harness.step()
    loading = ledger_of(harness.core).sequences[300]
    assert loading.state is State.LOADING
    for _ in range(3):
        harness.step()
    finished(harness, 4, [8, 8])
    assert loading.state is State.LOADING
    harness.run()  # nothing else is left: the worker waits for transfers
    finished(harness, 3, PROMPT)


@pytest.mark.parametrize("error", ["miss", "corrupt"])
def test_a_block_that_does_not_come_is_computed(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_of()
    ask(harness, 1, PROMPT)
    harness.run()
    push_out(harness, 2)
    harness.oracle.failing = 1.0
    monkeypatch.setattr("troupellm.tests.support.scheduler.tier_oracle.ERRORS", (error,))
    ask(harness, 3, PROMPT)
    harness.run()
    finished(harness, 3, PROMPT)
    assert usage(harness, 3).cached_tokens == 0
    harness.assert_idle()


def test_blocks_that_load_too_slowly_are_computed() -> None:
    harness = waiting_for_host()
    for _ in range(80):
        harness.step()
        if 3 in harness.reader.closed:
            break
    finished(harness, 3, PROMPT)
    snapshot = harness.core.snapshot()
    assert snapshot.offload.timeouts >= 1
    assert snapshot.blocks_used == 5, "blocks are held until their transfers have ended"
    harness.oracle.silent = False
    harness.run()
    assert harness.core.snapshot().offload.late >= 4
    harness.assert_idle()


def test_an_abort_while_loading_frees_blocks_when_the_transfers_end() -> None:
    harness = waiting_for_host()
    harness.step()
    harness.abort(3)
    assert 3 in harness.reader.closed
    assert harness.core.snapshot().blocks_used == 5
    plan = harness.plan()
    assert plan is not None
    assert len(plan.cancelled) == 4
    harness.oracle.silent = False
    harness.run()
    assert harness.core.snapshot().offload.late == 4
    harness.assert_idle()


def test_a_restart_finds_a_conversation_on_disk() -> None:
    harness = harness_of(("disk", "peer"))
    ask(harness, 1, PROMPT)
    harness.run()
    disk = harness.oracle.tiers.outer[0]
    assert len(disk) == 5  # its answer has filled another block
    later = harness_of(("disk", "peer"))
    later.oracle.tiers.outer[0] = disk
    ask(later, 1, PROMPT)
    later.run()
    finished(later, 1, PROMPT)
    sources = usage(later, 1).cached_sources
    assert (sources.host, sources.disk, sources.external) == (0, 16, 0)
    later.assert_idle()
    shared = harness_of(("disk", "peer"))
    shared.oracle.tiers.outer[1] = disk
    ask(shared, 1, PROMPT)
    shared.run()
    assert usage(shared, 1).cached_sources.external == 16


@pytest.mark.parametrize(("places", "failing"), [(4, 0.0), (1, 0.0), (4, 0.5)])
def test_a_prefix_longer_than_host_memory_comes_from_disk(places: int, failing: float) -> None:
    prompt = PROMPT + PROMPT[::-1]
    harness = harness_of(("disk",))
    ask(harness, 1, prompt)
    harness.run()
    later = harness_of(("disk",), places=places, failing=failing)
    later.oracle.tiers.outer[0] = harness.oracle.tiers.outer[0]
    ask(later, 1, prompt)
    later.run()
    finished(later, 1, prompt)
    sources = usage(later, 1).cached_sources
    if not failing:
        assert (sources.device, sources.host, sources.disk) == (0, 0, 32)
        assert later.core.snapshot().offload.tiers[1].loads == 8
    later.assert_idle()


def test_one_deadline_for_all_blocks_of_a_slow_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPT + PROMPT[::-1]
    harness = harness_of(("disk",))
    ask(harness, 1, prompt)
    harness.run()
    later = harness_of(("disk",), timeout=6.0)
    # A block every other second, never late by itself.
    monkeypatch.setattr(later.oracle.tiers, "ends", lambda order: order.kind != "fetch")
    later.oracle.tiers.outer[0] = harness.oracle.tiers.outer[0]
    ask(later, 1, prompt)
    later.run()
    finished(later, 1, prompt)
    assert 0 < usage(later, 1).cached_sources.disk < 32
    assert later.core.snapshot().offload.timeouts == 1
    later.assert_idle()


@pytest.mark.parametrize(("mode", "asked"), [("auto", False), ("recompute", False), ("offload", True)])
def test_a_tier_that_is_slower_than_computing_is_not_asked(mode: str, asked: bool) -> None:
    harness = harness_of(("disk",))
    ask(harness, 1, PROMPT)
    harness.run()
    later = harness_of(("disk",), mode=mode)
    later.oracle.tiers.outer[0] = harness.oracle.tiers.outer[0]
    set_prompt_cost(offload_of(later.core).cost, lambda: 0.001)
    offload_of(later.core).cost.learn(fetch_from(1), 1.0)
    ask(later, 1, PROMPT)
    later.run()
    finished(later, 1, PROMPT)
    assert usage(later, 1).cached_sources.disk == (16 if asked else 0)
    assert (later.core.snapshot().offload.tiers[1].lookups > 0) == asked


def test_a_load_that_does_not_pay_is_tried_again_after_many_admissions_not_many_questions() -> None:
    harness = harness_of(mode="auto")
    cost = offload_of(harness.core).cost
    set_prompt_cost(cost, lambda: 0.001)
    cost.learn("load", 0.0041)
    assert not any(cost.load_pays() for _ in range(1000))
    for number in range(1, 40):
        ask(harness, number, [number, 1])
    harness.run()
    assert cost.load_pays()


def test_fetches_are_measured_for_the_choice_to_fetch() -> None:
    harness = harness_of(("disk",))
    ask(harness, 1, PROMPT)
    harness.run()
    later = harness_of(("disk",), mode="auto")
    later.oracle.tiers.outer[0] = harness.oracle.tiers.outer[0]
    ask(later, 1, PROMPT)
    later.run()
    cost = offload_of(later.core).cost
    set_prompt_cost(cost, lambda: 0.0004)  # a block of 4 takes less than the two milliseconds that the toy tiers tell
    assert not cost.fetch_pays(1)
    assert cost.fetch_pays(2)


def test_a_prompt_is_charged_once_whether_outer_tiers_were_asked_or_not() -> None:
    def charged(outer: tuple[str, ...]) -> float:
        harness = harness_of(outer)
        ask(harness, 1, PROMPT)
        harness.run()
        return shares_of(harness.core).served("")

    assert charged(("disk",)) == charged(()) > len(PROMPT)


def test_a_tier_that_is_left_alone_is_not_asked() -> None:
    harness = harness_of(("disk",))
    harness.oracle.reports.append(TierReport(tier=1, disabled="full"))
    ask(harness, 1, PROMPT)
    harness.run()
    asked = len([plan for plan in harness.plans if plan.lookups])
    push_out(harness, 2)
    assert len([plan for plan in harness.plans if plan.lookups]) == asked
    assert harness.core.snapshot().offload.tiers[1].disabled == "full"
    harness.oracle.reports.append(TierReport(tier=1))
    push_out(harness, 3)
    ask(harness, 4, [6] * 17)
    harness.run()
    assert len([plan for plan in harness.plans if plan.lookups]) > asked


def test_preempted_blocks_go_out_and_come_back_or_are_computed_as_asked() -> None:
    for mode, loads in (("offload", True), ("recompute", False)):
        harness = harness_of(mode=mode, rows=2)
        first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1]
        ask(harness, 1, first, 30)
        ask(harness, 2, second, 30)
        harness.run()
        finished(harness, 1, first, 30)
        finished(harness, 2, second, 30)
        assert harness.core.snapshot().preemptions > 0
        assert (harness.oracle.tiers.counts.get("load", 0) > 0) == loads
        harness.assert_idle()


def test_blocks_are_stored_after_so_many_uses() -> None:
    harness = harness_of(threshold=2)
    ask(harness, 1, PROMPT)
    harness.run()
    assert not harness.oracle.tiers.counts
    assert harness.core.snapshot().offload.filtered > 0
    ask(harness, 2, PROMPT)
    harness.run()
    assert harness.oracle.tiers.counts["store"] == 4
    harness.assert_idle()


def test_transfers_under_way_are_bounded() -> None:
    settings = tiered_ready(2000, (), num_blocks=1500, block_size=1, max_model_len=600)
    harness = TierHarness(settings, OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload"), {})
    prompt = [number % 6 + 1 for number in range(500)]
    ask(harness, 1, prompt)
    while harness.step():
        snapshot = harness.core.snapshot().offload
        assert snapshot.transfers <= STORES
    assert harness.oracle.tiers.counts["store"] >= STORES
    for number in (2, 3, 4):
        ask(harness, number, [number] * 590)
        harness.run()
    ask(harness, 5, prompt)
    most = 0
    while harness.step():
        most = max(most, sum(1 for one in harness.oracle.tiers.under_way if one.order.kind == "load"))
    assert most <= LOADS
    finished(harness, 5, prompt)
    harness.assert_idle()


def test_a_long_prompt_with_a_short_answer_is_stored_whole() -> None:
    settings = tiered_ready(2000, (), num_blocks=1500, block_size=1, max_model_len=1200)
    harness = TierHarness(settings, OffloadConfig(kv_offloading_size=1.0), {})
    ask(harness, 1, [number % 6 + 1 for number in range(1000)], 1)
    harness.run()
    assert harness.oracle.tiers.counts["store"] == 1000
    assert harness.core.snapshot().offload.tiers[0].dropped == 0
    harness.assert_idle()


def test_a_sleep_that_keeps_host_memory_keeps_what_was_written() -> None:
    harness = harness_of()
    ask(harness, 1, PROMPT)
    harness.run()
    held = dict(harness.oracle.tiers.host)
    harness.oracle.reset()
    harness.oracle.tiers.host = held
    harness.core.worker_sleeps(keeps_host=True)
    harness.core.worker_restarted(harness.settings)
    harness.core.assert_invariants()
    ask(harness, 2, PROMPT)
    harness.run()
    assert usage(harness, 2).cached_sources.host == 16
    harness.oracle.reset()
    harness.core.worker_sleeps(keeps_host=False)
    harness.core.worker_restarted(harness.settings)
    ask(harness, 3, PROMPT)
    harness.run()
    assert usage(harness, 3).cached_tokens == 0
    finished(harness, 3, PROMPT)


def test_a_slow_reader_gives_up_its_blocks_and_finds_them_again() -> None:
    harness = harness_of(rows=2)
    ask(harness, 1, PROMPT, 12)
    for _ in range(3):
        harness.step()
    harness.core.pause(1)
    push_out(harness, 2)
    assert ledger_of(harness.core).sequences[100].state is State.HELD
    harness.core.resume(1)
    harness.run()
    finished(harness, 1, PROMPT, 12)
    assert harness.oracle.tiers.counts["load"] >= 4
    harness.assert_idle()
