"""How many prompt tokens a step computes."""

import msgspec
import pytest

from troupellm.actors.scheduler.step_budget import LEAST_TOKENS, PrefillBudget
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, submission

MEASURED = msgspec.structs.replace(ready(), saturation_tokens=128, saturation_seconds=0.128)


def budget(**config: object) -> PrefillBudget:
    return PrefillBudget(SchedulerConfig(**config), MEASURED)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, 128),
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_num_prefill_tokens": 512}, 512),
        ({"max_num_prefill_tokens": 9999}, 2048),
    ],
)
def test_without_streams_it_is_what_fills_the_device(config: dict[str, int], most: int) -> None:
    made = budget(**config)
    assert made.most == made.tokens(100, streaming=False) == made.tokens(0, streaming=True) == most


def test_an_unmeasured_prefill_budget_is_the_steps_bound() -> None:
    assert PrefillBudget(SchedulerConfig(), ready()).tokens(0, streaming=False) == 2048


def test_streams_bound_it_to_their_target() -> None:
    made = budget(itl_target_ms=60.0)
    assert made.tokens(4, streaming=True) == 60  # a millisecond each, as measured at the start
    assert budget(itl_target_ms=0.0).tokens(4, streaming=True) == 128


QUICK = msgspec.structs.replace(ready(), saturation_tokens=128, saturation_seconds=0.0128)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, 384),  # two steps under way, a tenth of a second together, at a tenth of a millisecond per token
        ({"max_plans_in_flight": 1}, 896),
        ({"max_num_batched_tokens": 320}, 320),
        ({"max_num_prefill_tokens": 64}, 64),
        ({"itl_target_ms": 1.0}, 384),
    ],
)
def test_a_prompt_with_nothing_beside_it_takes_longer_steps(config: dict[str, object], most: int) -> None:
    made = PrefillBudget(SchedulerConfig(**config), QUICK)
    assert made.tokens(0, streaming=False, alone=True) == most
    assert made.tokens(0, streaming=False) == made.most


def test_where_tokens_take_long_or_were_not_timed_steps_are_as_ever() -> None:
    assert budget().tokens(0, streaming=False, alone=True) == 128
    assert PrefillBudget(SchedulerConfig(), ready()).tokens(0, streaming=False, alone=True) == 2048
    on_a_gpu = msgspec.structs.replace(QUICK, device="cuda")
    assert PrefillBudget(SchedulerConfig(), on_a_gpu).tokens(0, streaming=False, alone=True) == 128


def test_chunks_that_seemed_to_cost_nothing_beside_streams_make_no_lone_step_endless() -> None:
    made = PrefillBudget(SchedulerConfig(), QUICK)
    made.learn(prefill_tokens=0, decode_rows=15, planned_at=0.0, now=1.0)
    for _ in range(3000):
        made.learn(prefill_tokens=16, decode_rows=8, planned_at=0.0, now=1.0)
    assert made.tokens(0, streaming=False, alone=True) == 896


@pytest.fixture
def as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens keep the cost measured at the start, independent of the harness's clock."""
    monkeypatch.setattr(PrefillBudget, "learn", lambda *given, **named: None)


SMALL = msgspec.structs.replace(
    ready(num_blocks=400, max_model_len=1024), saturation_tokens=16, saturation_seconds=0.0032
)


def most_together(harness: Harness, since: int) -> int:
    """Prompt tokens of a plan."""
    return max(sum(count for count in plan.counts if count > 1) for plan in harness.plans[since:])


@pytest.mark.parametrize("plans", [1, 2])
def test_a_prompt_beside_another_one_is_not_alone(plans: int, as_measured: None) -> None:
    harness = Harness(make_core(SMALL, max_num_batched_tokens=240, max_plans_in_flight=plans), SMALL)
    harness.submit(submission(1, [1] * 900, max_tokens=2))
    harness.step()
    lone = len(harness.plans)
    assert {plan.counts for plan in harness.plans} == {(240,)}
    harness.submit(submission(2, [2] * 900, max_tokens=2))
    for _ in range(12):
        harness.step()
    assert most_together(harness, lone) == 16


@pytest.mark.parametrize("plans", [1, 2])
def test_a_prompt_beside_one_that_gets_tokens_is_not_alone(plans: int, as_measured: None) -> None:
    harness = Harness(make_core(SMALL, max_num_batched_tokens=240, max_plans_in_flight=plans), SMALL)
    harness.submit(submission(1, [1] * 10, max_tokens=200))
    for _ in range(3):
        harness.step()
    alone = len(harness.plans)
    harness.submit(submission(2, [2] * 900, max_tokens=2))
    for _ in range(12):
        harness.step()
    assert most_together(harness, alone) == 16


def test_the_budget_follows_the_measured_time_of_steps() -> None:
    """A device whose steps take 20 ms and 3 ms per prompt token comes to 100 ms, regardless of the first estimate."""
    made = budget(itl_target_ms=100.0)
    now = 0.0
    for turn in range(40):
        tokens = made.tokens(4, streaming=True) if turn % 4 else 0
        begin, now = now, now + 0.020 + 0.003 * tokens
        made.learn(prefill_tokens=tokens, decode_rows=4, planned_at=begin, now=now)
    assert made.tokens(4, streaming=True) == pytest.approx(80 / 3, abs=1)


def test_the_budget_converges_without_any_step_without_prompts() -> None:
    made = budget(itl_target_ms=100.0)
    now = 0.0
    for _ in range(60):
        tokens = made.tokens(4, streaming=True)
        begin, now = now, now + 0.020 + 0.001 * tokens
        made.learn(prefill_tokens=tokens, decode_rows=4, planned_at=begin, now=now)
    assert 0.020 + 0.001 * made.tokens(4, streaming=True) == pytest.approx(0.100, rel=0.05)


def test_prompts_do_not_starve_where_decoding_alone_misses_the_target() -> None:
    made = budget(itl_target_ms=50.0)
    made.learn(prefill_tokens=0, decode_rows=4, planned_at=0.0, now=0.1)
    assert made.tokens(4, streaming=True) == 100  # as long again as a step without prompts
    slow = budget(itl_target_ms=1.0)
    assert slow.tokens(4, streaming=True) == LEAST_TOKENS


def test_a_step_that_waited_behind_another_is_not_charged_for_that() -> None:
    made = budget(itl_target_ms=50.0)
    made.learn(prefill_tokens=0, decode_rows=4, planned_at=0.0, now=1.0)
    made.learn(prefill_tokens=0, decode_rows=4, planned_at=0.1, now=1.01)
    assert made._decode[3] == pytest.approx(0.7 * 1.0 + 0.3 * 0.01)


def test_prompts_that_come_together_get_their_first_tokens_one_after_another() -> None:
    made = ready(num_blocks=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=12), made)
    for request in range(1, 5):
        harness.submit(submission(request, [request] * 12, max_tokens=6))
    for _ in range(4):
        harness.step()
    assert [plan.counts for plan in harness.plans[:4]] == [(12,), (1, 12), (1, 1, 12), (1, 1, 1, 12)]


def test_a_prompt_that_ends_in_a_plan_in_flight_takes_nothing_from_the_next_one() -> None:
    """Its next token would push the end of another prompt, and with it a first token, into the step after."""
    made = ready(num_blocks=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=12, max_plans_in_flight=2), made)
    for request in range(1, 5):
        harness.submit(submission(request, [request] * 12, max_tokens=9))
    for _ in range(4):
        harness.step()
    assert [plan.counts for plan in harness.plans[:4]] == [(12,), (1, 12), (1, 1, 12), (1, 1, 1, 12)]


def test_the_budget_bounds_a_step_of_many_and_leaves_decoding_alone() -> None:
    made = ready(num_blocks=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=5, max_num_seqs=16), made)
    for request in range(1, 13):
        harness.submit(submission(request, [request] * 7, max_tokens=20))
    while harness.step():
        counts = harness.plans[-1].counts
        new = {row.row for row in harness.plans[-1].new_rows}
        prompts = sum(count for count in counts if count > 1) + len(new & {row for row in new if counts == ()})
        assert prompts <= 5
    assert len(harness.reader.closed) == 12
    assert max(len(plan.rows) for plan in harness.plans) > 5


def test_without_chunking_the_budget_ends_admission_and_splits_nothing() -> None:
    made = ready(num_blocks=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=5, enable_chunked_prefill=False), made)
    for request in range(1, 4):
        harness.submit(submission(request, [request] * 7, max_tokens=4))
    for _ in range(3):
        harness.step()
    assert [plan.counts for plan in harness.plans[:3]] == [(7,), (1, 7), (1, 1, 7)]
