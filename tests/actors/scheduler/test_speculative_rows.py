"""Elastic rows: what a plan leaves to the worker, what is reserved for it, and where a result leaves the row."""

import pytest

from troupellm.actors.scheduler.plans import BrokenResult
from troupellm.protocol.messages.metrics import StepStats
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, StepResult
from troupellm.tests.support.engines.inside import residents_of, shares_of
from troupellm.tests.support.scheduler.drafting_oracle import GUIDED, drafting_harness
from troupellm.tests.support.scheduler.oracle import Harness, ready, stream_of, submission

PROMPT = [1, 2, 3, 4, 5]


def decoding(harness: Harness, rows: int = 1, **fields: object) -> None:
    """Requests 1 to `rows`, all behind their first token, and nothing in flight."""
    for request in range(1, rows + 1):
        harness.submit(submission(request, [*PROMPT, request], **{"max_tokens": 40, **fields}))
    while harness.core.snapshot().tokens_generated < rows:
        harness.plan()
        while harness.oracle.pending:
            harness.finish()


def planned(harness: Harness) -> StepPlan:
    plan = harness.plan()
    assert plan is not None
    return plan


def test_prompts_are_plain_and_what_follows_is_elastic() -> None:
    harness = drafting_harness(hit_rate=1.0, max_num_batched_tokens=9, max_plans_in_flight=1)
    harness.submit(submission(1, list(range(1, 13)), max_tokens=20))
    first = planned(harness)
    assert (first.counts, first.draft_limits) == ((9,), ())
    harness.finish()
    assert planned(harness).draft_limits == ()
    harness.finish()
    third = planned(harness)
    assert (third.starts, third.counts, third.draft_limits) == ((12,), (1,), (4,))


def test_without_a_worker_that_verifies_nothing_is_elastic() -> None:
    harness = drafting_harness(ready(most_drafts=0), max_plans_in_flight=2)
    harness.submit(submission(1, PROMPT, max_tokens=20))
    harness.run()
    assert not any(plan.draft_limits for plan in harness.plans)


def test_the_worker_decides_where_the_second_of_two_plans_begins() -> None:
    harness = drafting_harness(ready(num_blocks=32, most_drafts=4), hit_rate=1.0, max_plans_in_flight=2)
    decoding(harness)
    known = len(PROMPT) + 2
    first, second = planned(harness), planned(harness)
    assert (first.starts, second.starts) == ((known - 1,), (known,)), "the lower bound goes by ones"
    assert first.draft_limits == second.draft_limits == (4,)
    covered = sum(len(change.appended_blocks[0]) for plan in (first, second) for change in plan.changes)
    assert 4 * (covered + 2) >= known - 1 + 10, "blocks for the worst case of both"
    harness.run()
    assert harness.reader.streams[100] == stream_of([*PROMPT, 1], 0, 40, frozenset())


def test_drafts_never_go_beyond_the_end() -> None:
    harness = drafting_harness(hit_rate=1.0, max_plans_in_flight=2)
    decoding(harness, max_tokens=4)
    assert [planned(harness).draft_limits for _ in range(2)] == [(1,), (0,)], "two plans share what is left"
    assert harness.plan() is None
    harness.run()
    assert len(harness.reader.streams[100]) == 4


def test_a_row_whose_drafts_are_not_kept_is_in_every_plan_up_to_its_end() -> None:
    """Also where the plan before left it out: with one plan in flight it might have all that is left."""
    harness = drafting_harness(ready(num_blocks=64, most_drafts=8), drafts=8, hit_rate=0.0, max_plans_in_flight=2)
    decoding(harness, max_tokens=11)
    plans = len(harness.plans)
    planned(harness)
    for left in range(9, 1, -1):
        planned(harness)
        harness.finish()
        assert len(harness.reader.streams[100]) == 11 - left
    harness.run()
    assert len(harness.plans) - plans == 10


def test_a_schedule_goes_by_the_size_of_the_batch() -> None:
    harness = drafting_harness(schedule=((2, 2, 1), (3, 8, 0)), max_plans_in_flight=1)
    decoding(harness, rows=3)
    assert planned(harness).draft_limits == (0, 0, 0)
    harness.finish()
    harness.abort(1)
    assert planned(harness).draft_limits == (1, 1)
    harness.finish()
    harness.abort(2)
    assert planned(harness).draft_limits == (4,)


def test_limits_shrink_before_a_row_or_a_prompt_goes_without() -> None:
    harness = drafting_harness(max_num_batched_tokens=12, max_plans_in_flight=1)
    decoding(harness, rows=3)
    assert planned(harness).draft_limits == (3, 3, 3), "twelve tokens for three rows"
    harness.finish()
    harness.submit(submission(4, list(range(1, 12))))
    plan = planned(harness)
    assert plan.draft_limits == (1, 1, 1, -1), "half of what the rows leave is for whoever waits"
    assert plan.counts == (1, 1, 1, 6)


def test_a_prompt_that_must_be_computed_at_once_goes_before_drafts() -> None:
    harness = drafting_harness(max_num_batched_tokens=12, max_plans_in_flight=1, enable_chunked_prefill=False)
    decoding(harness, rows=2)
    harness.submit(submission(3, list(range(10, 0, -1))))
    plan = planned(harness)
    assert (plan.draft_limits, plan.counts) == ((0, 0, -1), (1, 1, 10))


def test_no_sequence_is_preempted_for_a_draft_token() -> None:
    made = ready(num_blocks=3, block_size=8, most_drafts=4)
    harness = drafting_harness(made, hit_rate=0.0, max_plans_in_flight=1, caching=False)
    decoding(harness, rows=2, max_tokens=12)
    assert planned(harness).draft_limits == (4, 1), "the first has the last block, the second what is left of its own"
    harness.finish()
    assert planned(harness).draft_limits == (4, 0)
    assert harness.core.snapshot().preemptions == 0
    harness.finish()
    planned(harness)
    assert harness.core.snapshot().preemptions == 1, "for a position of its own"


def test_preemption_and_replay_give_the_same_tokens() -> None:
    made = ready(num_blocks=9, block_size=4, most_drafts=4)
    harness = drafting_harness(made, seed=3, max_plans_in_flight=2)
    for request in (1, 2, 3):
        harness.submit(submission(request, [*PROMPT, request], max_tokens=18))
    for _ in range(4):
        harness.step()
    harness.lose(fault=False)
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    assert harness.oracle.accepted > 0
    for request in (1, 2, 3):
        assert harness.reader.streams[100 * request] == stream_of([*PROMPT, request], 0, 18, frozenset())
    harness.assert_idle()


@pytest.mark.parametrize("plans", [1, 2])
def test_forced_tokens_are_computed_together(plans: int) -> None:
    harness = drafting_harness(ready(num_blocks=40, most_drafts=8), drafts=8, seed=5, max_plans_in_flight=plans)
    harness.submit(submission(1, PROMPT, max_tokens=50, sampling=GUIDED))
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 50, frozenset())
    assert len(harness.plans) < 30


def forcing(monkeypatch: pytest.MonkeyPatch, forced: int, drafts: int = 1, **config: object) -> Harness:
    """A guided row behind its first token, which forced so many more; blocks of one token, nothing in flight."""
    settings = ready(num_blocks=40, block_size=1, most_drafts=drafts)
    harness = drafting_harness(settings, hit_rate=0.0, **config)
    oracle, left = harness.oracle, [forced]
    monkeypatch.setattr(oracle, "_force", lambda row: oracle._draw(oracle.rows[row], left.pop() if left else 0))
    harness.submit(submission(1, PROMPT, max_tokens=20, sampling=GUIDED))
    while not harness.core.snapshot().tokens_generated:
        planned(harness)
        harness.finish()
    assert len(harness.reader.streams[100]) == 1 + forced
    return harness


def test_a_forced_token_of_a_plan_in_flight_is_not_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = forcing(monkeypatch, 1, max_plans_in_flight=2)
    assert planned(harness).draft_limits == (1,)
    harness.core.stop_string_met(100)
    harness.submit(submission(2, [*PROMPT, *harness.reader.streams[100], 1], max_tokens=1))
    assert planned(harness).starts == (len(PROMPT),)
    harness.run()
    harness.assert_idle()


@pytest.mark.parametrize(
    ("drafts", "counts"),
    [(1, [(5, 9), (7, 9), (9, 10)]), (0, [(5, 9), (8, 9), (9, 10), (10, 11)])],
    ids=["elastic", "plain"],
)
def test_forced_tokens_are_confirmed_as_far_as_plans_have_come_back(
    monkeypatch: pytest.MonkeyPatch, drafts: int, counts: list[tuple[int, int]]
) -> None:
    harness = forcing(monkeypatch, 3, drafts, max_num_batched_tokens=3)
    sequence = residents_of(harness.core).running[100]
    for confirmed, known in counts:
        assert (sequence.num_confirmed, len(sequence.tokens)) == (confirmed, known)
        planned(harness)
        assert sequence.num_confirmed == confirmed, "the plan is in flight"
        harness.finish()


def test_logprobs_are_cut_with_the_tokens_beyond_max_tokens() -> None:
    harness = drafting_harness(hit_rate=1.0, seed=1, max_plans_in_flight=2)
    sampling = SamplingState(temperature=0.0, logprobs=1)
    harness.submit(submission(1, PROMPT, max_tokens=9, sampling=sampling))
    harness.run()
    described = [entry for output in harness.outputs for entry in output.logprobs]
    positions = [entry.position + index for entry in described for index in range(len(entry.ranks) // 4)]
    assert positions == list(range(len(PROMPT), len(PROMPT) + 9))


def test_forks_share_the_prompt_and_speculate_apart() -> None:
    harness = drafting_harness(ready(num_blocks=40, most_drafts=4), seed=2, max_plans_in_flight=2)
    harness.submit(submission(1, PROMPT, rows=3, max_tokens=20))
    harness.run()
    for fork in range(3):
        assert harness.reader.streams[100 + fork] == stream_of(PROMPT, fork, 20, frozenset())


def test_drafts_are_counted_for_the_step_the_request_and_in_all() -> None:
    harness = drafting_harness(ready(num_blocks=40, most_drafts=4), hit_rate=0.6, seed=4)
    harness.submit(submission(1, PROMPT, max_tokens=40))
    harness.run()
    steps = [stats.drafts for stats in harness.core.take_stats() if isinstance(stats, StepStats) and stats.drafts]
    assert sum(step.drafted for step in steps) == harness.core.snapshot().draft_tokens > 0
    assert sum(step.accepted for step in steps) == sum(sum(step.accepted_at) for step in steps)
    snapshot, usage = harness.core.snapshot(), harness.reader.closed[1].usage
    assert usage.accepted_draft_tokens == snapshot.accepted_draft_tokens > 0
    assert (usage.draft_steps, usage.draft_tokens) == (snapshot.drafts, snapshot.draft_tokens)
    assert snapshot.acceptance_length == 1 + snapshot.accepted_draft_tokens / snapshot.drafts


def test_a_tenant_is_charged_by_tokens_generated_not_by_drafts() -> None:
    def served(hit_rate: float) -> float:
        harness = drafting_harness(ready(num_blocks=64, most_drafts=4), hit_rate=hit_rate, seed=6)
        decoding(harness, tenant="a")
        before, tokens = shares_of(harness.core).served("a"), harness.core.snapshot().tokens_generated
        for _ in range(4):
            harness.step()
        charged = shares_of(harness.core).served("a") - before
        return charged / (harness.core.snapshot().tokens_generated - tokens)

    assert served(0.0) < 2.6, "two for each token, and the plans that are under way"
    assert served(1.0) == pytest.approx(2.0, abs=0.5)


def test_tenants_are_told_apart_without_being_named() -> None:
    harness = drafting_harness()
    for request, owner in enumerate(({"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}, {"cache_salt": b"a"}, {})):
        harness.submit(submission(request + 1, PROMPT, **owner))
    rows: list[NewRow] = [new for plan in (planned(harness),) for new in plan.new_rows]
    names = {new.row: new.tenant for new in rows}
    assert names[100] == names[200] != ""
    assert len({names[100], names[300], names[400], names[500]}) == 4
    assert names[500] == ""


@pytest.mark.parametrize(
    ("tokens", "drafted", "accepted"),
    [
        ((1, 2), (), ()),
        ((1, 2), (5,), (1,)),
        ((1, 2), (1,), (2,)),
        ((1,), (1,), (1,)),
        ((1, 2), (1,), (0,)),
        ((), (), ()),
        ((1,), (1, 1), (0, 0)),
        ((1,), (), (0,)),
    ],
)
def test_results_that_contradict_their_plan_are_a_workers_fault(
    tokens: tuple[int, ...], drafted: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    harness = drafting_harness()
    decoding(harness)
    plan = planned(harness)
    result = StepResult(
        step=plan.step,
        engine_epoch=0,
        rows=plan.rows,
        epochs=plan.epochs,
        token_counts=(len(tokens),),
        tokens=tokens,
        drafted=drafted,
        accepted=accepted,
    )
    with pytest.raises(BrokenResult):
        harness.core.update(result, 99.0)
