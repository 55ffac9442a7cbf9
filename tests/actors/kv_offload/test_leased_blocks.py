"""Leased blocks and tiers: they are stored before they are given away, and a prefetch brings them back."""

from oracle import stream_of, submission
from tier_oracle import TierHarness, tiered_ready

from troupellm.protocol.config.kv_hints import PrefetchReport, PrefetchSession, PrefixLease
from troupellm.protocol.config.kv_offload import OffloadConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
"""Four full blocks of 4, and a token."""
LEASE = (PrefixLease(16, 1e6),)


def harness_of(
    outer: tuple[str, ...] = (),
    *,
    places: int = 32,
    blocks: int = 10,
    longest: int = 40,
    threshold: int = 0,
    windows: tuple[int | None, ...] = (None,),
    **tiers: object,
) -> TierHarness:
    settings = tiered_ready(places, outer, num_blocks=blocks, block_size=4, max_model_len=longest, windows=windows)
    config = OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload", kv_offload_store_threshold=threshold)
    return TierHarness(settings, config, {"max_num_seqs": 4}, **tiers)


def ask(harness: TierHarness, number: int, prompt: list[int] = PROMPT, **hints: object) -> object:
    """Where the prompt's tokens came from, once the request has ended."""
    harness.submit(submission(number, prompt, max_tokens=4, **hints))
    harness.run()
    assert harness.reader.streams[100 * number] == stream_of(prompt, 0, 4, frozenset())
    return harness.reader.closed[number].usage.cached_sources


def push_out(harness: TierHarness, number: int) -> None:
    """Other work takes every block of the device."""
    for index in range(-(-harness.settings.num_blocks // 10) + 1):
        ask(harness, 10 * number + index, [7 + 5 * number + index] * 35)


def empty_device(harness: TierHarness) -> None:
    """The scheduler knows the blocks of host memory still, but the oracle cannot load them any more."""
    harness.core.worker_sleeps(keeps_host=True)
    harness.oracle.reset()
    harness.core.worker_restarted(harness.settings)


def prefetch(harness: TierHarness, session: str = "s", tenant: str = "") -> PrefetchReport | None:
    answers: list[PrefetchReport | None] = []
    harness.core.leases.handle(PrefetchSession(tenant, session, answers.append))
    harness.core.assert_invariants()
    return answers[0]


def prefetched(harness: TierHarness) -> dict[str, int]:
    return harness.core.snapshot().leases.prefetched


def test_leased_blocks_are_stored_however_rarely_they_were_used() -> None:
    harness = harness_of(threshold=3)
    ask(harness, 1)
    assert harness.offload.tiers[0].blocks == 0
    ask(harness, 2, leases=LEASE)
    assert harness.offload.tiers[0].blocks == 5


def test_a_leased_block_that_is_given_away_is_stored_if_it_is_in_no_tier() -> None:
    harness = harness_of(threshold=9, failing=1.0)
    ask(harness, 1, leases=LEASE)
    assert harness.offload.tiers[0].blocks == 0
    harness.oracle.failing = 0.0
    push_out(harness, 2)
    assert harness.core.snapshot().leases.ends["evicted"] == 4
    sources = ask(harness, 5)
    assert (sources.device, sources.host) == (0, 16)


def test_a_block_is_stored_before_a_load_of_the_same_plan_takes_its_place() -> None:
    harness = harness_of()
    ask(harness, 1)
    push_out(harness, 2)
    harness.oracle.failing = 1.0
    ask(harness, 4, [9] * 21, leases=(PrefixLease(20, 1e6),))
    harness.oracle.failing = 0.0
    harness.submit(submission(5, [10] * 13, max_tokens=3))
    harness.step()
    harness.submit(submission(6, PROMPT, max_tokens=4))
    plan = harness.plan()
    kinds = [order.kind for order in plan.transfers]
    assert kinds == sorted(kinds, reverse=True)
    assert {"store", "load"} <= set(kinds)
    harness.run()
    assert harness.reader.streams[600] == stream_of(PROMPT, 0, 4, frozenset())


def test_a_prefetch_brings_a_session_back_from_host_memory_and_leases_it() -> None:
    harness = harness_of(blocks=20, places=64)
    ask(harness, 1, session="s")
    push_out(harness, 2)
    assert prefetch(harness) == PrefetchReport(present=0, loading=5)
    harness.run()
    assert prefetched(harness) == {"loaded": 5}
    assert harness.core.snapshot().leases.leased_blocks == 5
    sources = ask(harness, 5)
    assert (sources.device, sources.host) == (16, 0)
    harness.assert_idle()


def test_a_prefetch_asks_outer_tiers_for_what_host_memory_has_lost() -> None:
    harness = harness_of(("disk",), places=12, blocks=20)
    ask(harness, 1, session="s")
    for number in (2, 4):
        push_out(harness, number)
    report = prefetch(harness)
    assert (report.present, report.missing) == (0, 0)
    harness.run()
    assert prefetched(harness)["loaded"] == 5
    sources = ask(harness, 9)
    assert (sources.device, sources.disk) == (16, 0)
    harness.assert_idle()


def test_a_prefetch_brings_the_window_of_a_sliding_group() -> None:
    harness = harness_of(windows=(None, 6), places=128, blocks=20)
    ask(harness, 1, session="s")
    push_out(harness, 2)
    assert prefetch(harness).loading == 7
    harness.run()
    sources = ask(harness, 9, [*PROMPT, *stream_of(PROMPT, 0, 4, frozenset()), 1])
    assert (sources.device, sources.host) == (20, 0)
    harness.assert_idle()


def test_a_prefetch_takes_no_leased_block_and_no_block_in_use() -> None:
    harness = harness_of(blocks=14, places=64)
    ask(harness, 1, session="s")
    push_out(harness, 2)
    ask(harness, 5, [9] * 21, leases=(PrefixLease(20, 1e6),))
    harness.submit(submission(6, [10] * 16, max_tokens=20))
    harness.step()
    report = prefetch(harness)
    assert (report.loading, report.no_room) == (1, 4)
    assert "evicted" not in harness.core.snapshot().leases.ends
    harness.run()
    harness.assert_idle()


def test_a_lost_worker_and_a_failed_load_cost_a_prefetch_alone() -> None:
    harness = harness_of(blocks=20, places=64)
    ask(harness, 1, session="s")
    push_out(harness, 2)
    harness.oracle.silent = True
    prefetch(harness)
    harness.step()
    harness.oracle.silent = False
    harness.lose()
    assert prefetch(harness) == PrefetchReport(missing=5)
    ask(harness, 5, session="s")
    push_out(harness, 6)
    harness.oracle.failing = 1.0
    prefetch(harness)
    harness.run()
    assert prefetched(harness)["failed"] == 5
    harness.oracle.failing = 0.0
    ask(harness, 9)
    harness.assert_idle()


def test_while_there_is_no_worker_a_prefetch_finds_no_room() -> None:
    harness = harness_of()
    ask(harness, 1, session="s")
    harness.core.worker_sleeps(keeps_host=True)
    assert prefetch(harness) == PrefetchReport(no_room=5)
    harness.oracle.reset()
    harness.core.worker_restarted(harness.settings)
    harness.core.assert_invariants()


def test_a_prefetch_takes_at_most_a_quarter_of_the_free_and_unleased_blocks() -> None:
    harness = harness_of(blocks=18)
    ask(harness, 1, session="s")
    empty_device(harness)
    assert prefetch(harness) == PrefetchReport(loading=4, no_room=1)


def test_a_prefetch_takes_at_most_256_blocks() -> None:
    harness = harness_of(blocks=1100, places=300, longest=1060)
    ask(harness, 1, [1, 2, 3] * 348, session="s")
    empty_device(harness)
    assert prefetch(harness) == PrefetchReport(loading=256, no_room=5)


def test_prefetches_of_one_tenant_leave_room_for_another() -> None:
    harness = harness_of(blocks=80)
    for number in range(1, 11):
        ask(harness, number, [number] * 5, session=f"s{number}", tenant="two" if number == 10 else "one")
    empty_device(harness)
    reports = [prefetch(harness, f"s{number}", "one") for number in range(1, 10)]
    assert reports == [PrefetchReport(loading=2)] * 8 + [PrefetchReport(no_room=2)]
    assert prefetch(harness, "s10", "two") == PrefetchReport(loading=2)
