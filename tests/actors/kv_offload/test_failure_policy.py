"""Requests whose blocks a connector announced and did not deliver."""

import random

import msgspec
import pytest
from oracle import stream_of, submission
from tier_oracle import TierHarness, tiered_ready

from troupellm.protocol.config.kv_connectors import FailurePolicy
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.errors import KVLoadFailed
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierInfo
from troupellm.protocol.messages.worker import WorkerReady

PROMPT = list(range(1, 18))


def peered(policy: FailurePolicy, **sizes: object) -> WorkerReady:
    tiers = (TierInfo(name="disk"), TierInfo(name="peer", failure_policy=policy))
    return msgspec.structs.replace(tiered_ready(32, **sizes), tiers=tiers)


def harness_of(policy: FailurePolicy, **tiers: object) -> TierHarness:
    settings = peered(policy, num_blocks=16, block_size=4, max_model_len=48)
    return TierHarness(settings, OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload"), **tiers)


def left_device_and_host(harness: TierHarness) -> None:
    """A first request leaves its blocks in the outer tiers alone, and in the disk's none."""
    harness.submit(submission(1, PROMPT, max_tokens=2))
    harness.run(500)
    assert harness.oracle.tiers.outer[1]
    kept = dict(harness.oracle.tiers.outer[1])
    harness.core.reset_prefix_cache(external=False)
    harness.run(500)
    assert not harness.oracle.tiers.outer[0]
    assert harness.oracle.tiers.outer[1] == kept


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_tier_that_keeps_its_word_harms_nobody(policy: FailurePolicy) -> None:
    harness = harness_of(policy)
    left_device_and_host(harness)
    harness.submit(submission(2, PROMPT, max_tokens=4))
    harness.run(500)
    assert harness.reader.streams[200] == stream_of(PROMPT, 0, 4, frozenset())
    assert harness.oracle.tiers.counts["fetch"] == len(PROMPT) // 4
    harness.assert_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_tier_that_breaks_it(policy: FailurePolicy) -> None:
    harness = harness_of(policy)
    left_device_and_host(harness)
    harness.oracle.failing = 1.0
    harness.submit(submission(2, PROMPT, rows=2, max_tokens=4))
    harness.submit(submission(3, [7, 7, 7], max_tokens=4))
    harness.run(500)
    closed = harness.reader.closed[2]
    if policy == "fail":
        assert isinstance(closed.error, KVLoadFailed)
        assert "peer" in closed.error.message
        assert closed.error.retryable
    else:
        assert closed.error is None
        assert harness.reader.streams[200] == stream_of(PROMPT, 0, 4, frozenset())
    assert harness.reader.streams[300] == stream_of([7, 7, 7], 0, 4, frozenset())
    harness.assert_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", ["fetch", "load"])
def test_a_pause_counts_against_no_tier(policy: FailurePolicy, kind: str) -> None:
    harness = harness_of(policy)
    left_device_and_host(harness)
    harness.submit(submission(2, PROMPT, max_tokens=4))
    for _ in range(2 if kind == "load" else 1):
        harness.step()
    harness.oracle.silent = True
    harness.step()
    assert {each.order.kind for each in harness.oracle.tiers.under_way} == {kind}
    harness.core.pause_control.begin(lambda still: None, finish=False)
    assert harness.core.plan(harness.now) is None
    harness.now += 100.0
    harness.core.go_on()
    harness.oracle.silent = False
    harness.run(500)
    assert harness.reader.closed[2].error is None
    assert harness.reader.closed[2].usage.cached_sources.external == len(PROMPT) // 4 * 4
    assert harness.reader.streams[200] == stream_of(PROMPT, 0, 4, frozenset())
    assert harness.core.snapshot().offload.timeouts == 0
    harness.assert_idle()


def test_a_long_prefix_may_take_longer_than_a_block_may(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = peered("fail", num_blocks=16, block_size=4, max_model_len=48)
    config = OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload", kv_offload_timeout=12.0)
    harness, prompts = TierHarness(settings, config), [[first] * 41 for first in (1, 2)]
    for number, prompt in enumerate(prompts, 1):
        harness.submit(submission(number, prompt, max_tokens=2))
    harness.run(500)
    harness.core.reset_prefix_cache(external=False)
    harness.run(500)
    tiers = harness.oracle.tiers

    def ends(order: BlockTransfer) -> bool:
        """One block comes after the other, whosever it is."""
        fetches = [each.order for each in tiers.under_way if each.order.kind == "fetch"]
        return order.kind != "fetch" or order is fetches[0]

    monkeypatch.setattr(tiers, "ends", ends)
    for number, prompt in enumerate(prompts, 3):
        harness.submit(submission(number, prompt, max_tokens=4))
    harness.run(500)
    for number, prompt in enumerate(prompts, 3):
        assert harness.reader.closed[number].error is None
        assert harness.reader.streams[100 * number] == stream_of(prompt, 0, 4, frozenset())
        assert harness.reader.closed[number].usage.cached_sources.external == 40
    assert harness.core.snapshot().offload.timeouts == 0
    harness.assert_idle()


@pytest.mark.parametrize("seed", range(8))
def test_crowds_under_the_strict_policy_leak_nothing(seed: int) -> None:
    """Each request has the tokens of a solo run, or the error; aborts come in between."""
    source = random.Random(seed)
    harness = harness_of("fail", speed=0.4, failing=0.3, seed=seed)
    prompts = [[first] * 9 + [first, 2, 3] for first in range(1, 5)]
    wanted, aborted = {}, set()
    for number in range(1, 61):
        prompt = [*source.choice(prompts), source.randrange(1, 6)]
        wanted[number] = stream_of(prompt, 0, 6, frozenset())
        harness.submit(submission(number, prompt, max_tokens=6))
        if source.random() < 0.1:
            harness.abort(number)
            aborted.add(number)
        if source.random() < 0.3:
            harness.run(500)
            harness.core.reset_prefix_cache(external=False)
        harness.core.assert_invariants()
    harness.run(5000)
    harness.assert_idle()
    failed = 0
    for number, tokens in wanted.items():
        error = harness.reader.closed[number].error
        if isinstance(error, KVLoadFailed):
            failed += 1
        elif number not in aborted:
            assert error is None
            assert harness.reader.streams[100 * number] == tokens
    assert 0 < failed < 60
