"""Many requests on few blocks, with tiers behind them: everybody has the tokens of a solo run, and nothing leaks."""

import random
from typing import Any

import pytest

from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.messages.kv_transfers import TierReport
from troupellm.protocol.messages.output import StepOutput
from troupellm.tests.support.engines.inside import block_tables_of
from troupellm.tests.support.scheduler.oracle import stream_of, submission
from troupellm.tests.support.scheduler.tier_oracle import TierHarness, tiered_ready

PREFIXES = ([], [1] * 8, [2] * 12, [1, 2] * 6)
LONG = (*PREFIXES, [3, 1, 2] * 7, [3] * 20)


def offload(mode: str = "auto", policy: str = "lru", threshold: int = 0) -> OffloadConfig:
    return OffloadConfig(
        kv_offloading_size=1.0,
        preemption_mode=mode,
        kv_offload_policy=policy,
        kv_offload_store_threshold=threshold,
    )


PLAIN = ((), (None,), 1.0, 0.0, 1, "lru")
DISK = (("disk",), (None,), 0.3, 0.2, 2, "arc")
WINDOW = (("disk", "peer"), (None, 6), 0.3, 0.2, 2, "lru")
Setup = tuple[tuple[str, ...], tuple[int | None, ...], float, float, int, str]
"""Outer tiers, windows, speed and failures of transfers, plans in flight, policy."""


def test_two_hundred_requests_on_sixteen_blocks() -> None:
    crowd("auto", WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "offload", "auto"])
@pytest.mark.parametrize("setup", [PLAIN, DISK, WINDOW])
def test_two_hundred_requests_in_every_setup(mode: str, setup: Setup) -> None:
    crowd(mode, setup)


def crowd(mode: str, setup: Setup) -> None:
    outer, windows, speed, failing, plans, policy = setup
    source = random.Random(mode + str(windows))
    settings = tiered_ready(64, outer, num_blocks=16, block_size=4, max_model_len=48, windows=windows)
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "max_plans_in_flight": plans}
    harness = TierHarness(settings, offload(mode, policy), config, speed=speed, failing=failing, seed=len(mode))
    right = {}
    for number in range(1, 201):
        prompt = source.choice(PREFIXES) + [source.randrange(1, 6) for _ in range(source.randint(1, 10))]
        right[100 * number] = stream_of(prompt, 0, 24, frozenset())
        harness.submit(submission(number, prompt, max_tokens=24))
    harness.run(40_000)
    harness.assert_idle()
    assert harness.reader.streams == right
    snapshot = harness.core.snapshot()
    assert snapshot.preemptions > 20
    assert snapshot.offload is not None
    assert harness.oracle.tiers.counts["load"] > 0


class Walk:
    """Random operations, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        source = self.source = random.Random(seed)
        windows = source.choice([(None,), (None,), (None, 6), (5,), (None, None)])
        outer = source.choice([(), (), ("disk",), ("disk", "peer")])
        self.settings = tiered_ready(
            source.choice([1, 3, 6, 20, 64]),
            outer,
            num_blocks=source.randint(9, 16),
            block_size=source.choice([2, 4]),
            max_model_len=32,
            windows=windows,
        )
        config = {
            "max_num_seqs": source.randint(1, 6),
            "max_num_batched_tokens": source.choice([4, 16, 64]),
            "max_plans_in_flight": source.choice([1, 2]),
        }
        mode = source.choice(["auto", "recompute", "offload"])
        settings = offload(mode, source.choice(["lru", "arc"]), source.choice([0, 0, 2]))
        speed, failing = source.choice([1.0, 0.5, 0.15]), source.choice([0, 0, 0.2])
        self.harness = TierHarness(self.settings, settings, config, speed=speed, failing=failing, seed=seed)
        self.right: dict[int, list[int]] = {}
        self.requests = 0
        self.paused: set[int] = set()
        self.outer = len(outer)

    def live(self) -> list[int]:
        return [number for number in range(1, self.requests + 1) if number not in self.harness.reader.closed]

    def submit(self) -> None:
        source = self.source
        self.requests += 1
        prompt = source.choice(LONG) + [source.randrange(1, 6) for _ in range(source.randint(1, 4))]
        rows = source.choice([1, 1, 1, 2, 3])
        for fork in range(rows):
            self.right[100 * self.requests + fork] = stream_of(prompt, fork, 6, frozenset())
        self.harness.submit(submission(self.requests, prompt, rows=rows, max_tokens=6))

    def sleep(self) -> None:
        harness, keeps = self.harness, self.source.random() < 0.5
        while harness.oracle.pending:
            harness.finish()
        held = dict(harness.oracle.tiers.host)
        harness.oracle.reset()
        if keeps:
            harness.oracle.tiers.host = held
        harness.core.worker_sleeps(keeps_host=keeps)
        harness.core.assert_invariants()
        harness.core.worker_restarted(self.settings)
        harness.core.assert_invariants()
        harness.reader.read(harness.core.take_output())

    def act(self) -> None:
        source, harness, core = self.source, self.harness, self.harness.core
        live, turn = self.live(), source.random()
        if turn < 0.25 and len(live) < 12:
            self.submit()
        elif turn < 0.33 and live:
            harness.abort(source.choice(live))
        elif turn < 0.38 and live:
            self.paused.add(source.choice(live))
            core.pause(max(self.paused))
        elif turn < 0.45 and self.paused:
            core.resume(self.paused.pop())
        elif turn < 0.46:
            core.reset_prefix_cache(external=source.random() < 0.5)
        elif turn < 0.47:
            harness.lose(fault=source.random() < 0.5)
        elif turn < 0.48:
            self.sleep()
        elif turn < 0.52 and self.outer:
            why = source.choice(["", "No space left on device"])
            harness.oracle.reports.append(TierReport(tier=source.randint(1, self.outer), disabled=why))
        elif turn < 0.8:
            harness.plan()
        elif harness.oracle.pending:
            harness.finish()
        core.assert_invariants()

    def settle(self) -> None:
        for number in self.paused:
            self.harness.core.resume(number)
        self.harness.oracle.speed = max(self.harness.oracle.speed, 0.3)
        self.harness.run(10_000)
        self.harness.assert_idle()
        closed = self.harness.reader.closed
        assert closed.keys() == set(range(1, self.requests + 1))
        for row, right in self.right.items():
            shown = self.harness.reader.streams.get(row, [])
            assert shown == (right if closed[row // 100].error is None else right[: len(shown)])


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_walks_keep_tokens_right_and_leak_nothing(first: int) -> None:
    for seed in range(first, first + 10):
        walk = Walk(seed)
        for _ in range(120):
            walk.act()
        walk.settle()


@pytest.mark.slow
def test_random_walks_keep_tokens_right_over_many_seeds() -> None:
    for seed in range(100, 700):
        walk = Walk(seed)
        for _ in range(200):
            walk.act()
        walk.settle()


def abort_storm(aborts: int, seed: int) -> dict[str, Any]:
    """Requests come, and go while transfers are under way, until so many were aborted in that state."""
    source = random.Random(seed)
    settings = tiered_ready(48, ("disk", "peer"), num_blocks=40, block_size=4, max_model_len=48, windows=(None, 12))
    config = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "max_plans_in_flight": 2}
    harness = TierHarness(settings, offload("offload"), config, speed=0.25, failing=0.05, seed=seed)
    told = {"aborted": 0, "loading": 0}
    number = 0
    while told["aborted"] < aborts:
        live = [request for request in range(max(1, number - 60), number + 1) if request not in harness.reader.closed]
        if len(live) < 30:
            number += 1
            prompt = source.choice(PREFIXES) * 2 + [source.randrange(1, 4) for _ in range(source.randint(1, 8))]
            harness.core.submit(submission(number, prompt, max_tokens=8))
        shown = harness.core.snapshot().offload
        assert shown is not None
        if live and shown.transfers and source.random() < 0.6:
            told["aborted"] += 1
            told["loading"] += shown.loading > 0
            harness.core.abort(source.choice(live))
            harness.reader.read(harness.core.take_output())
        plan = harness.core.plan(harness.now)
        harness.now += 0.01
        if plan is not None:
            harness.oracle.launch(plan)
        if harness.oracle.pending and source.random() < 0.7:
            output: StepOutput = harness.core.update(harness.oracle.collect(), harness.now)
            harness.reader.read(output)
        if told["aborted"] % 50 == 0:
            harness.core.assert_invariants()
    harness.run(20_000)
    harness.assert_idle()
    told["late"] = harness.core.snapshot().offload.late
    return told


def test_aborts_during_transfers_leak_nothing() -> None:
    told = abort_storm(600, seed=1)
    assert told["loading"] > 100
    assert told["late"] > 0


@pytest.mark.slow
def test_ten_thousand_aborts_during_transfers_leak_nothing() -> None:
    told = abort_storm(10_000, seed=2)
    assert told["loading"] > 2000
    assert told["late"] > 100


def test_nothing_is_loaded_into_what_a_plan_copies_before_the_plan_behind_that_is_made() -> None:
    settings = tiered_ready(8, num_blocks=10, block_size=4, max_model_len=40)
    harness = TierHarness(settings, offload(), {"max_plans_in_flight": 2})
    harness.submit(submission(1, [3, 1, 4, 1, 5, 9, 2, 6], max_tokens=4))
    harness.run()
    harness.submit(submission(2, [3, 1, 4, 1, 5, 9, 1], max_tokens=8))
    plan = harness.plan()
    assert plan is not None
    (copy,) = plan.copies
    tables = block_tables_of(harness.core)
    assert tables.being_copied(copy.source), "a device may not have come to it"
    assert tables.being_copied(copy.target)
    assert harness.plan() is not None
    assert not tables.being_copied(copy.source)
    assert not tables.being_copied(copy.target)
    harness.run()
    harness.assert_idle()
