"""Whose turn it is among tenants while sequences wait for tiers."""

from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.tests.support.engines.inside import counters_of, residents_of, shares_of
from troupellm.tests.support.scheduler.oracle import submission
from troupellm.tests.support.scheduler.tier_oracle import TierHarness, tiered_ready

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
"""Four full blocks of 4, and a token."""
SHORT = [8, 8]
"""Shorter than a block: no tier is asked for it."""


def harness_of(outer: tuple[str, ...] = ("disk",), blocks: int = 20, **limits: object) -> TierHarness:
    settings = tiered_ready(32, outer, num_blocks=blocks, block_size=4, max_model_len=40)
    config = OffloadConfig(kv_offloading_size=1.0, preemption_mode="offload", kv_offload_timeout=100.0)
    return TierHarness(settings, config, limits)


def send(harness: TierHarness, request: int, prompt: list[int], tenant: str, max_tokens: int = 4) -> None:
    harness.submit(submission(request, prompt, tenant=tenant, max_tokens=max_tokens))


def started(harness: TierHarness) -> list[int]:
    """Requests in the order of their first steps."""
    rows = [new.row // 100 for plan in harness.plans for new in plan.new_rows]
    return list(dict.fromkeys(rows))


def served(harness: TierHarness, tenant: str) -> float:
    return shares_of(harness.core).served(tenant)


def test_a_turn_spent_on_asking_outer_tiers_is_a_turn() -> None:
    harness = harness_of(max_num_seqs=1)
    harness.oracle.silent = True
    send(harness, 1, PROMPT, "two")
    send(harness, 2, SHORT, "one")
    send(harness, 3, SHORT, "two")
    harness.step()
    assert started(harness) == [2]
    harness.oracle.silent = False
    harness.run()
    assert started(harness) == [2, 1, 3]
    harness.assert_idle()


def test_tokens_from_outer_tiers_are_not_charged() -> None:
    first = harness_of()
    send(first, 1, PROMPT, "a")
    first.run()
    later = harness_of()
    later.oracle.tiers.outer[0] = first.oracle.tiers.outer[0]
    send(later, 1, PROMPT, "a")
    later.step()
    assert served(later, "a") == len(PROMPT)
    later.run()
    assert served(later, "a") == served(first, "a") - 16


def test_an_abort_while_outer_tiers_are_asked_takes_the_promise_back() -> None:
    harness = harness_of(max_num_seqs=1)
    harness.oracle.silent = True
    send(harness, 1, PROMPT, "a")
    harness.step()
    send(harness, 2, SHORT, "a")
    send(harness, 3, PROMPT, "b")
    assert served(harness, "a") == len(PROMPT)
    harness.abort(1)
    assert served(harness, "a") == 0.0
    harness.oracle.silent = False
    harness.run()
    assert started(harness) == [2, 3]
    harness.assert_idle()


def test_a_tenant_whose_promise_was_not_charged_keeps_its_place_in_the_order() -> None:
    """A promise that ends without a charge gives the tenant the place that it had before."""
    harness = harness_of(max_num_seqs=1)
    harness.oracle.silent = True
    send(harness, 1, PROMPT, "a")
    send(harness, 2, SHORT, "a")
    send(harness, 3, SHORT, "b")
    send(harness, 4, SHORT, "b")
    harness.step()
    harness.abort(1)
    harness.oracle.silent = False
    harness.run()
    assert started(harness) == [3, 2, 4]
    harness.assert_idle()


def only_in_host_memory(prompts: list[list[int]], **limits: object) -> TierHarness:
    """The device has forgotten what tenant a computed, and transfers do not end."""
    harness = harness_of((), **limits)
    for request, prompt in enumerate(prompts, 1):
        send(harness, request, prompt, "a")
    harness.run()
    host = dict(harness.oracle.tiers.host)
    harness.oracle.reset()
    harness.oracle.tiers.host = host
    harness.core.worker_sleeps(keeps_host=True)
    harness.core.worker_restarted(harness.settings)
    harness.oracle.silent = True
    harness.plans.clear()
    return harness


def loading(harness: TierHarness) -> list[int]:
    return sorted(sequence.request.number for sequence in residents_of(harness.core).loading.values())


def test_a_tenant_who_waits_for_blocks_is_not_at_rest() -> None:
    """Else what it asks for next would begin level with those who were served most, as if it had asked for nothing."""
    for harness in (only_in_host_memory([PROMPT]), harness_of(("disk",))):
        harness.oracle.silent = True
        send(harness, 11, PROMPT, "a")
        harness.step()
        assert loading(harness) == [11]
        send(harness, 12, SHORT, "b", max_tokens=30)
        for _ in range(12):
            harness.step()
        before = served(harness, "a")
        assert served(harness, "b") > before
        send(harness, 13, SHORT, "a")
        assert served(harness, "a") == before
        send(harness, 14, SHORT, "c")
        settled = counters_of(shares_of(harness.core))
        assert settled.get("c", 0.0) <= settled.get("a", 0.0)


def test_sequences_that_load_count_when_a_tenant_asks_others_to_make_way() -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    harness = only_in_host_memory(prompts, blocks=40, max_num_seqs=4)
    send(harness, 11, SHORT, "b", max_tokens=30)
    send(harness, 12, SHORT, "b", max_tokens=30)
    harness.step()
    for request, prompt in enumerate(prompts, 13):
        send(harness, request, prompt, "a")
    harness.step()
    assert loading(harness) == [13, 14]
    send(harness, 15, SHORT, "a")
    for _ in range(4):
        harness.step()
    assert harness.core.snapshot().preemptions == 0
    harness.oracle.silent = False
    harness.run()
    assert harness.core.snapshot().preemptions == 0
    harness.assert_idle()


def test_a_row_that_loads_is_taken_when_a_tenant_without_one_comes() -> None:
    harness = only_in_host_memory([PROMPT], blocks=40, max_num_seqs=3)
    send(harness, 11, SHORT, "a", max_tokens=30)
    send(harness, 12, SHORT, "a", max_tokens=30)
    send(harness, 13, PROMPT, "a")
    harness.step()
    assert loading(harness) == [13]
    send(harness, 14, SHORT, "b")
    for _ in range(2):
        harness.step()
    assert started(harness) == [11, 12, 14]
    assert harness.core.snapshot().preemptions == 1
    harness.oracle.silent = False
    harness.run()
    harness.assert_idle()
