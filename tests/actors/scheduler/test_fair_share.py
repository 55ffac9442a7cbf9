"""Fair shares: whose turn it is, who makes way, and what a rest earns."""

from collections import Counter

import pytest

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.victims import SEARCH_STEPS
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.protocol.config.engine import TenantConfig
from troupellm.tests.support.engines.inside import counters_of, shares_of
from troupellm.tests.support.scheduler.oracle import Harness, beam_submission, make_core, ready, stream_of, submission
from troupellm.tests.support.scheduler.plain_beams import beams_of

NEVER = frozenset[int]()


def flood(harness: Harness, tenant: str, first: int, requests: int, length: int = 6, max_tokens: int = 8) -> None:
    for request in range(first, first + requests):
        harness.submit(submission(request, [1 + request % 40] * length, tenant=tenant, max_tokens=max_tokens))


def served_first(harness: Harness) -> list[int]:
    """Requests in the order of their first steps."""
    order: list[int] = []
    for plan in harness.plans:
        order += [new.row // 100 for new in plan.new_rows if new.row // 100 not in order]
    return order


def test_tenants_take_turns_whatever_they_have_queued() -> None:
    harness = Harness(make_core(max_num_seqs=1))
    flood(harness, "loud", 1, 10)
    flood(harness, "quiet", 11, 3)
    harness.run()
    order = ["loud" if request <= 10 else "quiet" for request in served_first(harness)]
    assert order[:6].count("quiet") == 3


def test_within_a_tenant_the_first_to_come_is_the_first_served() -> None:
    harness = Harness(make_core(max_num_seqs=1))
    flood(harness, "a", 1, 5)
    flood(harness, "b", 6, 5)
    harness.run()
    order = served_first(harness)
    assert [request for request in order if request <= 5] == [1, 2, 3, 4, 5]
    assert [request for request in order if request > 5] == [6, 7, 8, 9, 10]


def test_first_come_first_served_looks_at_no_tenant() -> None:
    harness = Harness(make_core(max_num_seqs=1, scheduling_policy="fcfs"))
    flood(harness, "loud", 1, 4)
    flood(harness, "quiet", 5, 2)
    harness.run()
    assert served_first(harness) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("long", [6, 24])
def test_equal_parts_are_counted_in_tokens_and_not_in_requests(long: int) -> None:
    """One tenant sends prompts that are `long`, the other short ones; both always have more to ask for."""
    core = make_core(ready(num_blocks=200), max_num_seqs=2, max_num_batched_tokens=12, max_num_prefill_tokens=8)
    harness = Harness(core, ready(num_blocks=200))
    flood(harness, "long", 1, 40, length=long, max_tokens=2)
    flood(harness, "short", 101, 200, length=3, max_tokens=2)
    tokens: Counter[str] = Counter()
    for _ in range(60):
        harness.step()
    for plan in harness.plans:
        for new in plan.new_rows:
            request = new.row // 100
            tokens["long" if request <= 40 else "short"] += (long if request <= 40 else 3) + 2 * 2
    assert 0.7 < tokens["long"] / tokens["short"] < 1.4  # turn by turn it would be up to 4


def test_a_weight_is_a_part_of_the_whole() -> None:
    tenants = (TenantConfig(name="gold", weight=3.0), TenantConfig(name="tin"))
    harness = Harness(make_core(max_num_seqs=1, tenants=tenants))
    flood(harness, "gold", 1, 40)
    flood(harness, "tin", 41, 40)
    for _ in range(300):
        harness.step()
    order = served_first(harness)
    gold = sum(request <= 40 for request in order[:24])
    assert 16 <= gold <= 20


def test_the_priority_of_a_key_counts_before_that_of_a_request() -> None:
    tenants = (TenantConfig(name="first", priority=-1), TenantConfig(name="second", priority=1))
    harness = Harness(make_core(max_num_seqs=1, scheduling_policy="priority", tenants=tenants))
    harness.submit(submission(1, [1, 2, 3], tenant="second", priority=-(2**31)))
    harness.submit(submission(2, [1, 2, 3], tenant="first", priority=2**31 - 1))
    harness.submit(submission(3, [1, 2, 3], tenant="", priority=0))
    harness.run()
    assert served_first(harness) == [2, 3, 1]


def test_a_newcomer_gets_a_row_in_the_next_step_although_all_are_taken() -> None:
    harness = Harness(make_core(ready(num_blocks=200), max_num_seqs=4), ready(num_blocks=200))
    flood(harness, "loud", 1, 12, max_tokens=30)
    for _ in range(3):
        harness.step()
    harness.submit(submission(100, [7, 8, 9], tenant="quiet", max_tokens=4))
    harness.step()
    assert [new.row for new in harness.plans[-1].new_rows] == [10000]
    assert harness.core.snapshot().preemptions == 1
    harness.run()
    for request in range(1, 13):  # who made way lost no token
        right = stream_of([1 + request % 40] * 6, 0, 30, NEVER)
        assert harness.reader.streams[100 * request] == right


def test_a_fairness_preemption_happens_once_and_its_sequence_continues() -> None:
    harness = Harness(make_core(ready(num_blocks=400), max_num_seqs=4), ready(num_blocks=400))
    flood(harness, "loud", 1, 8, max_tokens=40)
    harness.step()
    flood(harness, "quiet", 101, 8, max_tokens=40)
    for _ in range(20):
        harness.step()
    snapshot = harness.core.snapshot()
    assert snapshot.preemptions == 2  # half of four rows, once
    rows = harness.plans[-1].rows
    assert sum(row < 10000 for row in rows) == sum(row >= 10000 for row in rows) == 2
    harness.run()


def test_blocks_make_way_too() -> None:
    made = ready(num_blocks=16)
    harness = Harness(make_core(made, caching=False), made)
    flood(harness, "loud", 1, 6, length=10, max_tokens=20)
    for _ in range(4):
        harness.step()
    harness.submit(submission(100, [5] * 9, tenant="quiet", max_tokens=4))
    for _ in range(3):
        harness.step()
    assert 10000 in harness.plans[-1].rows
    harness.run()
    for request in range(1, 7):
        assert harness.reader.streams[100 * request] == stream_of([1 + request % 40] * 10, 0, 20, NEVER)


def test_a_rest_earns_nothing() -> None:
    fair_share = FairShare()
    fair_share.arrive("a", ())
    fair_share.runs("a")
    fair_share.charge("a", 1000)
    fair_share.arrive("b", ())
    assert fair_share.served("b") == 999
    fair_share.runs("b")
    fair_share.rests("b")
    fair_share.charge("a", 500)
    fair_share.arrive("b", ())
    assert fair_share.served("b") == 1499


def test_a_returning_tenant_starts_level_with_the_least_served_one() -> None:
    fair_share = FairShare()
    for tenant, tokens in (("least", 300), ("most", 900)):
        fair_share.arrive(tenant, ())
        fair_share.runs(tenant)
        fair_share.charge(tenant, tokens)
    least = fair_share.served("least")
    fair_share.arrive("returns", ())
    assert fair_share.served("returns") == least - 1.0


def test_served_tokens_are_remembered_while_a_tenant_is_idle() -> None:
    fair_share = FairShare()
    fair_share.arrive("a", ())
    fair_share.runs("a")
    fair_share.arrive("b", ())
    fair_share.charge("b", 700)
    fair_share.arrive("b", ())
    assert (fair_share.served("a"), fair_share.served("b")) == (0, 700)


def test_counters_of_tenants_that_come_and_go_are_bounded() -> None:
    fair_share = FairShare()
    fair_share.runs("stays")
    for number in range(20_000):
        fair_share.arrive(f"tenant-{number}", ())
        fair_share.charge(f"tenant-{number}", number)
    assert len(counters_of(fair_share)) <= 4097


def test_counters_of_tenants_that_come_one_at_a_time_are_bounded() -> None:
    """No other tenant is there when one of them comes."""
    fair_share = FairShare()
    waiting_queue = WaitingQueue(fair_share)
    for number in range(20_000):
        name = f"tenant-{number}"
        waiting_queue.arrive(name)
        fair_share.charge(name, 20_000 - number)
        fair_share.runs(name)
        fair_share.charge_step()
        fair_share.rests(name)
        assert len(counters_of(fair_share)) <= 4097
    assert fair_share.served("tenant-19999") > 0


def test_a_tenant_whose_counter_was_forgotten_starts_level() -> None:
    made = ready(num_blocks=200)
    harness = Harness(make_core(made, max_num_seqs=1), made)
    flood(harness, "heavy", 1, 2, max_tokens=40)
    for _ in range(35):
        harness.step()
    harness.abort(1)
    harness.abort(2)
    counters_of(shares_of(harness.core)).clear()  # as thousands of others do who come and go
    flood(harness, "heavy", 4, 3, max_tokens=2)
    flood(harness, "light", 10, 12, max_tokens=2)
    harness.run()
    assert set(served_first(harness)[1:6]) >= {4, 5}


def test_a_step_is_charged_by_running_rows_over_the_weight() -> None:
    fair_share = FairShare({"half": 0.5})
    fair_share.runs("a")
    fair_share.runs("a")
    fair_share.runs("half")
    fair_share.charge_step()
    assert (fair_share.served("a"), fair_share.served("half")) == (4, 4)


def search(harness: Harness, request: int, width: int, tenant: str, **fields: int) -> None:
    harness.submit(beam_submission(request, [request % 40] * 5, width, tenant=tenant, **{"max_tokens": 12} | fields))


def found(harness: Harness, request: int, width: int, max_tokens: int = 12) -> bool:
    expected = beams_of([request % 40] * 5, width, max_tokens, NEVER)
    return [harness.reader.streams[100 * request + place] for place in range(width)] == expected


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("head_start", [3, 8])
@pytest.mark.parametrize("budget", [4, 64])
def test_searches_of_two_tenants_do_not_take_the_rows_from_each_other(
    budget: int, head_start: int, caching: bool
) -> None:
    made = ready(num_blocks=400)
    core = make_core(made, caching=caching, max_num_seqs=3, max_num_batched_tokens=budget, max_plans_in_flight=2)
    harness = Harness(core, made)
    search(harness, 1, 3, "a")
    for _ in range(head_start):
        harness.step()
    search(harness, 2, 3, "b")
    harness.run(150)
    assert found(harness, 1, 3)
    assert found(harness, 2, 3)
    assert core.snapshot().preemptions <= 3
    harness.assert_idle()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("plans", [1, 2])
def test_a_search_that_fills_all_rows_makes_room_for_another_tenant(plans: int, caching: bool) -> None:
    made = ready(num_blocks=400, max_model_len=200)
    core = make_core(made, caching=caching, max_num_seqs=4, max_num_batched_tokens=64, max_plans_in_flight=plans)
    harness = Harness(core, made)
    search(harness, 1, 4, "a", max_tokens=100)
    asked: dict[int, int] = {}
    for request in range(2, 8):
        for _ in range(20):
            harness.step()
        harness.submit(submission(request, [request] * 5, tenant="b", max_tokens=4))
        asked[request] = len(harness.plans)
        while 100 * request not in harness.reader.streams:
            assert len(harness.plans) - asked[request] <= SEARCH_STEPS + 12
            harness.step()
    harness.run()
    assert found(harness, 1, 4, 100)
    assert 1 <= core.snapshot().preemptions <= 4 * 6
    harness.assert_idle()


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("width", [3, 6, 8])
def test_a_search_ends_beside_a_tenant_who_always_asks_for_more(width: int, plans: int) -> None:
    made = ready(num_blocks=400)
    core = make_core(made, max_num_seqs=8, max_num_batched_tokens=64, max_plans_in_flight=plans)
    harness = Harness(core, made)
    search(harness, 1, width, "a")
    opened = 1
    for _ in range(150):
        while opened - len(harness.reader.closed) < 9:
            opened += 1
            flood(harness, "b", opened, 1, length=3, max_tokens=5)
        harness.step()
        if 1 in harness.reader.closed:
            break
    assert found(harness, 1, width)
    assert len(harness.reader.closed) > 1  # nor did the search stop the others
    harness.run()


@pytest.mark.parametrize("blocks", [20, 26])
@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_searches_that_do_not_fit_together_all_end(caching: bool, budget: int, blocks: int) -> None:
    """Each alone takes most of the blocks, so memory does force one to give way, and they must not take turns."""
    made = ready(num_blocks=blocks, block_size=2, max_model_len=20)
    core = make_core(made, caching=caching, max_num_batched_tokens=budget, max_plans_in_flight=2, max_num_seqs=6)
    harness = Harness(core, made)
    for request, tenant in enumerate("abab", 1):
        search(harness, request, 3, tenant, max_tokens=10)
        flood(harness, "c", 100 + request, 1, length=4, max_tokens=9)
    harness.run(1500)
    assert all(found(harness, request, 3, 10) for request in range(1, 5))
    harness.assert_idle()


def test_beside_a_search_the_next_best_tenant_makes_way() -> None:
    made = ready(num_blocks=400)
    harness = Harness(make_core(made, max_num_seqs=8), made)
    search(harness, 1, 5, "searches")
    for _ in range(3):
        harness.step()
    flood(harness, "loud", 10, 6, max_tokens=30)
    for _ in range(2):
        harness.step()
    flood(harness, "quiet", 20, 1, max_tokens=4)
    harness.step()
    assert 2000 in [new.row for new in harness.plans[-1].new_rows]
    assert harness.core.snapshot().preemptions == 1
    harness.run()
    assert found(harness, 1, 5)
