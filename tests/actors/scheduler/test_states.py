"""States beside the KV cache: where sequences begin again, and which slots hold what.

The oracle asserts with every span that the row's state stands for exactly the tokens before it.
"""

import random
from itertools import pairwise

import pytest

from troupellm.protocol.messages.snapshot import StatesSnapshot
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.tests.support.scheduler.oracle import EOS, Harness, make_core, ready, stream_of, submission

NEVER: frozenset[int] = frozenset()
PLANS = pytest.mark.parametrize("plans", [1, 2])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed + 7 * place + place // 49) % 49 for place in range(length)]


def stateful(num_blocks: int = 256, slots: int = 16, **fields: object) -> WorkerReady:
    return ready(num_blocks, 4, max_model_len=512, windows=fields.pop("windows", (None,)), state_slots=slots, **fields)


def harness_of(settings: WorkerReady, *, caching: bool = True, **config: object) -> Harness:
    return Harness(make_core(settings, caching=caching, **{"state_snapshot_interval": 0, **config}), settings)


def serve(harness: Harness, number: int, tokens: list[int], max_tokens: int = 8, **fields: object) -> list[int]:
    """Its stream, when it is over."""
    harness.submit(submission(number, tokens, max_tokens=max_tokens, **fields))
    harness.run()
    return harness.reader.streams[100 * number]


def computed(harness: Harness, number: int, tokens: list[int], **fields: object) -> int:
    """Positions that a request computes."""
    before = harness.oracle.num_computed
    serve(harness, number, tokens, **fields)
    return harness.oracle.num_computed - before


def states(harness: Harness) -> StatesSnapshot:
    found = harness.core.snapshot().states
    assert found is not None
    return found


@PLANS
def test_the_same_prompt_computes_less_than_a_block_of_it(plans: int) -> None:
    harness = harness_of(stateful(), max_plans_in_flight=plans)
    first = serve(harness, 1, prompt(101))
    assert computed(harness, 2, prompt(101), max_tokens=1) == 1
    assert serve(harness, 3, prompt(102)) == stream_of(prompt(102), 0, 8, NEVER)
    assert first == stream_of(prompt(101), 0, 8, NEVER)
    assert states(harness).hits == 2
    assert states(harness).used == 0


@PLANS
def test_a_second_turn_goes_on_behind_the_first_answer(plans: int) -> None:
    harness = harness_of(stateful(), max_plans_in_flight=plans)
    for seed in range(8):  # answers end anywhere within a block
        first = prompt(90 + seed, seed)
        answer = serve(harness, 10 + seed, first, max_tokens=40)
        turn = [*first, *answer, *prompt(9, 3)]
        assert computed(harness, 30 + seed, turn, max_tokens=1) <= 9 + 1


@PLANS
def test_a_turn_that_ends_by_a_stop_token_leaves_its_state(plans: int) -> None:
    harness = harness_of(stateful(), max_plans_in_flight=plans)
    first, seed = prompt(50), 0
    while len(answer := stream_of(first, 0, 40, frozenset({EOS}))) == 40:
        seed += 1
        first = prompt(50, seed)
    assert serve(harness, 1, first, max_tokens=40, eos_token_ids=frozenset({EOS})) == answer
    assert computed(harness, 2, [*first, *answer, *prompt(9, 3)], max_tokens=1) <= 9 + 1


def test_another_last_turn_begins_at_the_border_before_it() -> None:
    harness = harness_of(stateful())
    serve(harness, 1, [*prompt(71), *prompt(40, 5)], borders=(71,))
    assert computed(harness, 2, [*prompt(71), *prompt(40, 6)], max_tokens=1) == 111 - 68


def test_a_prompt_that_differs_late_begins_at_the_interval() -> None:
    harness = harness_of(stateful(), state_snapshot_interval=32)
    serve(harness, 1, [*prompt(80), *prompt(20, 5)])
    assert computed(harness, 2, [*prompt(80), *prompt(20, 6)], max_tokens=1) == 100 - 64
    assert computed(harness, 3, [*prompt(31), *prompt(20, 6)], max_tokens=1) == 51


def test_an_answer_leaves_snapshots_at_the_interval() -> None:
    harness = harness_of(stateful(), state_snapshot_interval=16, max_plans_in_flight=2)
    answer = serve(harness, 1, prompt(10), max_tokens=50)
    assert computed(harness, 2, [*prompt(10), *answer[:30], 60], max_tokens=1) == 41 - 32


def test_a_prompt_shorter_than_a_block_leaves_its_end_only() -> None:
    harness = harness_of(stateful())
    answer = serve(harness, 1, prompt(3), max_tokens=2)
    assert states(harness).snapshots == 1
    assert computed(harness, 2, [*prompt(3), *answer[:1], 60], max_tokens=1) == 1
    assert computed(harness, 3, prompt(3), max_tokens=1) == 3


@pytest.mark.parametrize("slots", [2, 3, 5])
@PLANS
def test_few_slots_make_sequences_wait_and_fail_none(slots: int, plans: int) -> None:
    harness = harness_of(stateful(slots=slots), max_plans_in_flight=plans, state_snapshot_interval=8)
    for number in range(1, 9):
        harness.submit(submission(number, prompt(20 + number % 3, number % 4), max_tokens=12))
    harness.run()
    for number in range(1, 9):
        assert harness.reader.streams[100 * number] == stream_of(prompt(20 + number % 3, number % 4), 0, 12, NEVER)
    harness.assert_idle()
    assert states(harness).evictions > 0


@PLANS
def test_preempted_sequences_say_the_same(plans: int) -> None:
    settings = stateful(num_blocks=20)
    harness = harness_of(settings, max_plans_in_flight=plans, max_num_batched_tokens=24)
    for number in range(1, 6):
        harness.submit(submission(number, prompt(17 + number, number), max_tokens=40))
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    for number in range(1, 6):
        assert harness.reader.streams[100 * number] == stream_of(prompt(17 + number, number), 0, 40, NEVER)
    harness.assert_idle()


@pytest.mark.parametrize("seed", [2, 55])
def test_a_row_that_is_preempted_within_a_plan_leaves_no_state_of_that_plan(seed: int) -> None:
    """Its span is counted already, and is never computed. Others compute the same tokens and would begin behind it."""
    draw = random.Random(seed)
    settings = stateful(num_blocks=draw.choice([14, 18, 24]), slots=draw.choice([6, 12]))
    plans, budget, interval = draw.choice([1, 2]), draw.choice([6, 12, 24]), draw.choice([0, 4, 8])
    limits = {"max_plans_in_flight": plans, "max_num_batched_tokens": budget, "state_snapshot_interval": interval}
    harness = harness_of(settings, **limits)
    for number in range(1, 10):
        tokens = prompt(draw.choice([9, 14, 17, 21]), draw.randrange(2))
        harness.submit(submission(number, tokens, max_tokens=draw.choice([3, 12, 25])))
        for _ in range(draw.randrange(3)):
            harness.step()
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    harness.assert_idle()


def test_forks_begin_behind_the_snapshot_of_their_prompt() -> None:
    harness = harness_of(stateful())
    before = harness.oracle.num_computed
    harness.submit(submission(1, prompt(50), rows=3, max_tokens=4))
    harness.run()
    for fork in range(3):
        assert harness.reader.streams[100 + fork] == stream_of(prompt(50), fork, 4, NEVER)
    assert harness.oracle.num_computed - before == 50 + 2 * 2 + 3 * 3


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    harness = harness_of(stateful(), caching=False, state_snapshot_interval=8)
    serve(harness, 1, prompt(60))
    assert states(harness).snapshots == 0
    assert computed(harness, 2, prompt(60), max_tokens=1) == 60


def test_a_reset_of_the_prefix_cache_drops_all_snapshots() -> None:
    harness = harness_of(stateful(), state_snapshot_interval=16)
    serve(harness, 1, prompt(60))
    assert states(harness).snapshots > 1
    harness.core.reset_prefix_cache()
    assert states(harness).snapshots == 0
    assert computed(harness, 2, prompt(60), max_tokens=1) == 60


def test_a_failed_sequence_leaves_no_snapshot() -> None:
    harness = harness_of(stateful(), max_plans_in_flight=2, state_snapshot_interval=8)
    harness.submit(submission(1, prompt(30), max_tokens=20))
    for _ in range(6):
        harness.step()
    harness.oracle.broken_rows.add(100)
    harness.run()
    assert states(harness).snapshots == states(harness).used == 0
    assert computed(harness, 2, prompt(30), max_tokens=1) == 30


def test_a_row_that_fails_after_its_sequence_has_ended_leaves_nothing_of_that_plan() -> None:
    """The plan behind the stop token is in flight then; its state and the last token's KV are not to be trusted."""
    harness = harness_of(stateful(), max_plans_in_flight=2)
    answer = stream_of(prompt(30), 0, 8, NEVER)[:5]
    harness.submit(submission(1, prompt(30), max_tokens=8, stop_token_ids=frozenset({answer[-1]})))
    harness.plan()
    while len(harness.reader.streams.get(100, ())) < len(answer) - 1:
        harness.plan()
        harness.finish()
    harness.oracle.broken_rows.add(100)
    harness.run()
    assert not harness.oracle.broken_rows
    assert harness.reader.streams[100] == answer
    assert harness.reader.failed == {}
    assert states(harness).snapshots == states(harness).used == 0
    turn = [*prompt(30), *answer, *prompt(5, 3)]
    assert computed(harness, 2, turn, max_tokens=1) == len(turn)


@pytest.mark.parametrize("chunk", [5, 8, 23])
def test_an_abort_within_a_prompt_leaves_what_was_computed(chunk: int) -> None:
    """Two plans of the prompt may be in flight then, each over several blocks."""
    harness = harness_of(stateful(), max_plans_in_flight=2, max_num_batched_tokens=chunk)
    harness.submit(submission(1, prompt(90), max_tokens=4))
    while harness.plan() is not None:
        pass
    harness.abort(1)
    harness.run()
    longer = [*prompt(90), *prompt(9, 3)]
    assert computed(harness, 2, longer, max_tokens=1) == 99 - 2 * chunk
    assert serve(harness, 3, longer) == stream_of(longer, 0, 8, NEVER)


def test_a_lost_worker_takes_all_states_with_it() -> None:
    harness = harness_of(stateful(), max_plans_in_flight=2, state_snapshot_interval=8)
    harness.submit(submission(1, prompt(30), max_tokens=20))
    for _ in range(6):
        harness.step()
    harness.lose()
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(30), 0, 20, NEVER)
    harness.assert_idle()


def test_no_slot_is_lost_over_many_aborts() -> None:
    harness = harness_of(stateful(slots=6), max_plans_in_flight=2, max_num_seqs=4, state_snapshot_interval=8)
    for number in range(1, 150):
        harness.submit(submission(number, prompt(5 + number % 40, number % 7), max_tokens=20))
        for _ in range(number % 4):
            harness.step()
        harness.abort(number - number % 3)
    harness.run()
    harness.assert_idle()
    assert states(harness).used == 0


def test_spans_never_shrink_to_nothing() -> None:
    """Chunks that end at every border: each one computes something."""
    harness = harness_of(stateful(), state_snapshot_interval=4, max_num_batched_tokens=6)
    assert serve(harness, 1, prompt(45), borders=(9, 20)) == stream_of(prompt(45), 0, 8, NEVER)
    spans = [(plan.starts[0], plan.counts[0]) for plan in harness.plans if plan.rows]
    assert all(start + count == following for (start, count), (following, _) in pairwise(spans))
    assert min(count for _, count in spans) > 0


@PLANS
def test_groups_with_windows_and_states_agree_on_a_prefix(plans: int) -> None:
    harness = harness_of(stateful(windows=(None, 10)), max_plans_in_flight=plans, state_snapshot_interval=16)
    for seed in range(6):
        first = [*prompt(60), *prompt(20 + seed, seed)]
        assert serve(harness, 1 + seed, first, max_tokens=20) == stream_of(first, 0, 20, NEVER)
    assert states(harness).hits >= 5
