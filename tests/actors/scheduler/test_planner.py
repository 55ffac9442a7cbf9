"""The contents of a step: budgets, chunks, order, preemption, and two plans in flight."""

import struct

import msgspec
import pytest

from troupellm.actors.scheduler.planner import SchedulerFrozen
from troupellm.actors.scheduler.plans import MOST_NEW_BYTES
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import GuideProgram
from troupellm.protocol.wire.frames import MAX_FRAME_BYTES
from troupellm.tests.support.engines.inside import block_tables_of, ledger_of, residents_of
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission


def prompt(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def test_an_idle_scheduler_plans_nothing() -> None:
    assert make_core().plan(0.0) is None


def test_a_new_row_carries_everything_and_a_decode_row_four_integers() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt(6)))
    first = harness.plan()
    assert first is not None
    (row,) = first.new_rows
    assert (row.row, row.epoch, row.request_id, row.num_prompt_tokens) == (100, 0, "request-1", 6)
    assert struct.unpack("<6i", row.token_ids) == (1, 2, 3, 4, 5, 6)
    assert [len(table) for table in row.blocks] == [2]
    assert (first.rows, first.epochs, first.starts, first.counts) == ((100,), (0,), (0,), (6,))
    harness.finish()
    second = harness.plan()
    assert second is not None
    assert (second.starts, second.counts, second.new_rows, second.changes) == ((6,), (1,), (), ())


def test_new_rows_that_bring_much_are_spread_over_plans_each_of_which_fits_a_frame() -> None:
    """A frame that is too large would end the engine, with everybody's requests."""
    guide = GuideProgram(backend="llguidance", text="x" * (MOST_NEW_BYTES // 5 * 2))
    harness = Harness(make_core())
    for request in range(1, 5):
        harness.submit(submission(request, prompt(3), rows=2, sampling=SamplingState(guide=guide), max_tokens=2))
    harness.run()
    news = [len(plan.new_rows) for plan in harness.plans]
    assert (sum(news), max(news)) == (8, 2)
    for plan in harness.plans:
        assert len(msgspec.msgpack.encode(plan)) < MAX_FRAME_BYTES // 2
    alone = GuideProgram(backend="llguidance", text="x" * (MOST_NEW_BYTES + 1))
    harness.submit(submission(5, prompt(3), sampling=SamplingState(guide=alone)))
    harness.run()
    assert harness.plans[-1].rows == (500,)


def test_blocks_are_appended_when_the_table_ends() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt(7), max_tokens=6))
    harness.run()
    changes = [(plan.starts, plan.changes[0].appended_blocks) for plan in harness.plans if plan.changes]
    assert [(start, len(added[0])) for start, added in changes] == [((8,), 1)]


def test_a_long_prompt_is_chunked_and_decodes_go_first() -> None:
    harness = Harness(make_core(max_num_batched_tokens=8))
    harness.submit(submission(1, prompt(3)))
    harness.step()
    harness.submit(submission(2, prompt(20, 20)))
    for _ in range(3):
        harness.step()
    assert [(plan.rows, plan.counts) for plan in harness.plans[1:4]] == [
        ((100, 200), (1, 7)),
        ((100, 200), (1, 7)),
        ((100, 200), (1, 6)),
    ]
    assert [output.rows for output in harness.outputs[1:4]] == [(100,), (100,), (100, 200)]


def test_without_chunking_a_prompt_is_computed_whole() -> None:
    harness = Harness(make_core(max_num_batched_tokens=8, enable_chunked_prefill=False))
    harness.submit(submission(1, prompt(5)))
    harness.submit(submission(2, prompt(5, 20), max_tokens=2))
    harness.submit(submission(3, prompt(8, 30), max_tokens=2))
    harness.run()
    whole = {plan.new_rows[0].row: plan.counts[-1] for plan in harness.plans if plan.new_rows}
    assert whole == {100: 5, 200: 5, 300: 8}
    assert all(sum(plan.counts) <= 8 for plan in harness.plans)


def test_without_chunking_a_preempted_sequence_longer_than_a_step_comes_back() -> None:
    settings = ready(num_blocks=8, block_size=2, max_model_len=16)
    core = make_core(settings, max_num_batched_tokens=6, enable_chunked_prefill=False, caching=False)
    harness = Harness(core, settings)
    for request in (1, 2):
        harness.submit(submission(request, prompt(4, 10 * request), max_tokens=11))
    harness.run()
    assert core.snapshot().preemptions > 0
    for request in (1, 2):
        expected = stream_of(prompt(4, 10 * request), 0, 11, frozenset())
        assert harness.reader.streams[100 * request] == expected


def test_no_request_is_admitted_while_a_running_sequence_lacks_budget() -> None:
    """Without chunking the rest of a long sequence needs more than decodes leave; a small newcomer must not take it."""
    settings = ready(num_blocks=16, block_size=4, max_model_len=32)
    core = make_core(settings, max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    harness = Harness(core, settings)
    harness.submit(submission(1, prompt(7), max_tokens=20))
    for _ in range(7):
        harness.step()
    residents_of(core).preempt(ledger_of(core).sequences[100])  # 14 tokens: two steps, 8 and 6
    harness.step()
    for request in (2, 3, 4):
        harness.submit(submission(request, prompt(1, 10 * request), max_tokens=20))
    core.pause(1)
    harness.step()
    core.resume(1)
    harness.submit(submission(5, prompt(4, 40)))
    harness.step()
    assert harness.plans[-1].rows == (200, 300, 400)
    core.abort(2)
    harness.step()
    assert (harness.plans[-1].rows, harness.plans[-1].counts) == ((300, 400, 100), (1, 1, 6))


def test_no_more_rows_and_tokens_than_configured() -> None:
    harness = Harness(make_core(max_num_seqs=3, max_num_batched_tokens=10))
    for request in range(1, 8):
        harness.submit(submission(request, prompt(4, request)))
    harness.run()
    assert max(len(plan.rows) for plan in harness.plans) == 3
    assert max(sum(plan.counts) for plan in harness.plans) == 10
    assert len(harness.reader.closed) == 7


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [100, 200, 300]), ("priority", [300, 100, 200])])
def test_the_waiting_room_is_served_in_the_policys_order(policy: str, order: list[int]) -> None:
    harness = Harness(make_core(max_num_seqs=1, scheduling_policy=policy))
    for request, priority in ((1, 0), (2, 0), (3, -1)):
        harness.submit(submission(request, prompt(4), max_tokens=2, priority=priority))
    harness.run()
    assert [row.row for plan in harness.plans for row in plan.new_rows] == order


def test_the_latest_arrived_is_preempted_and_recomputed_with_all_its_tokens() -> None:
    settings = ready(num_blocks=6, block_size=2, max_model_len=12)
    harness = Harness(make_core(settings, caching=False), settings)
    harness.submit(submission(1, prompt(4), max_tokens=8))
    harness.submit(submission(2, prompt(4, 20), max_tokens=8))
    harness.run()
    returns = [row for plan in harness.plans for row in plan.new_rows if row.epoch > 0]
    assert [row.row for row in returns] == [200]
    assert returns[0].num_prompt_tokens == 4
    assert len(returns[0].token_ids) > 4 * 4
    assert any(200 in plan.freed_rows for plan in harness.plans)
    assert harness.reader.streams[100] == stream_of(prompt(4), 0, 8, frozenset())
    assert harness.reader.streams[200] == stream_of(prompt(4, 20), 0, 8, frozenset())
    assert harness.core.snapshot().preemptions == 1
    assert sum(stats.preemptions for stats in harness.core.take_stats() if hasattr(stats, "preemptions")) == 1
    harness.assert_idle()


def test_the_lowest_priority_is_preempted_under_the_priority_policy() -> None:
    settings = ready(num_blocks=6, block_size=2, max_model_len=12)
    harness = Harness(make_core(settings, caching=False, scheduling_policy="priority"), settings)
    harness.submit(submission(1, prompt(4), max_tokens=8, priority=1))
    harness.submit(submission(2, prompt(4, 20), max_tokens=8, priority=0))
    harness.run()
    assert {row.row for plan in harness.plans for row in plan.new_rows if row.epoch > 0} == {100}


def test_retired_rows_are_told_once() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt(4), max_tokens=2))
    harness.run()
    harness.submit(submission(2, prompt(4, 20), max_tokens=2))
    harness.run()
    assert [plan.freed_rows for plan in harness.plans] == [(), (), (100,), ()]


def test_two_plans_in_flight_overlap_and_change_no_token() -> None:
    harness = Harness(make_core(max_plans_in_flight=2))
    harness.submit(submission(1, prompt(6), max_tokens=5))
    plans = [harness.plan(), harness.plan(), harness.plan()]
    assert [plan and (plan.starts, plan.counts) for plan in plans] == [((0,), (6,)), ((6,), (1,)), None]
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(6), 0, 5, frozenset())
    assert sum(sum(plan.counts) for plan in harness.plans) == 6 + 4, "nothing is planned beyond the limit"
    harness.assert_idle()


def test_a_sequence_that_ends_with_a_plan_in_flight_shows_nothing_more() -> None:
    stream = stream_of(prompt(6), 0, 8, frozenset())
    stop = next(token for index, token in enumerate(stream) if index and token not in stream[:index])
    harness = Harness(make_core(max_plans_in_flight=2))
    harness.submit(submission(1, prompt(6), eos_token_ids=frozenset({stop})))
    while not harness.reader.finished:
        harness.step()
    assert harness.reader.streams[100] == stream[: stream.index(stop) + 1]
    assert harness.reader.closed
    assert harness.core.snapshot().blocks_used > 0, "its blocks are still being written"
    harness.run()
    assert harness.core.num_dropped_results == 1
    assert harness.reader.closed[1].usage.completion_tokens == stream.index(stop) + 1
    harness.assert_idle()


def test_blocks_taken_from_a_plan_in_flight_are_not_given_away_before_it_returns() -> None:
    settings = ready(num_blocks=6, block_size=2, max_model_len=12)
    harness = Harness(make_core(settings, caching=False, max_plans_in_flight=2), settings)
    for request in (1, 2):
        harness.submit(submission(request, prompt(4, 10 * request), max_tokens=8))
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    for request in (1, 2):
        expected = stream_of(prompt(4, 10 * request), 0, 8, frozenset())
        assert harness.reader.streams[100 * request] == expected


def test_a_paused_reader_is_left_out_and_comes_back() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt(4)))
    harness.submit(submission(2, prompt(4, 20)))
    harness.step()
    harness.core.pause(1)
    harness.core.pause(1)
    harness.step()
    assert harness.plans[-1].rows == (200,)
    snapshot = harness.core.snapshot()
    assert (snapshot.running, snapshot.paused) == (1, 1)
    harness.core.resume(1)
    harness.step()
    assert set(harness.plans[-1].rows) == {100, 200}
    assert not harness.plans[-1].new_rows, "a paused sequence keeps its blocks"
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(4), 0, 8, frozenset())


def test_a_paused_reader_gives_way_when_blocks_are_short() -> None:
    settings = ready(num_blocks=5, block_size=2, max_model_len=10)
    harness = Harness(make_core(settings, caching=False), settings)
    harness.submit(submission(1, prompt(4), max_tokens=6))
    harness.step()
    harness.core.pause(1)
    harness.submit(submission(2, prompt(6, 20), max_tokens=4))
    harness.run()
    assert set(harness.reader.closed) == {2}
    assert (harness.core.snapshot().paused, harness.core.snapshot().blocks_used) == (1, 0)
    harness.core.resume(1)
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(4), 0, 6, frozenset())


def test_the_newest_paused_reader_gives_way_first() -> None:
    settings = ready(num_blocks=6, block_size=2, max_model_len=10)
    harness = Harness(make_core(settings, caching=False), settings)
    for request in (1, 2):
        harness.submit(submission(request, prompt(4, 10 * request), max_tokens=6))
    harness.step()
    for request in (1, 2):
        harness.core.pause(request)
    harness.submit(submission(3, prompt(6, 30), max_tokens=2))
    harness.run()
    assert set(harness.reader.closed) == {3}
    assert harness.core.snapshot().preemptions == 1
    before = len(harness.plans)
    for request in (1, 2):
        harness.core.resume(request)
    harness.run()
    introduced = [new.row for plan in harness.plans[before:] for new in plan.new_rows]
    assert introduced == [200]  # the other one has kept its blocks


def test_resumed_readers_beyond_the_row_limit_take_turns() -> None:
    harness = Harness(make_core(max_num_seqs=2))
    for request in (1, 2, 3):
        harness.submit(submission(request, prompt(4, 10 * request), max_tokens=20))
    harness.step()
    harness.core.pause(1)
    harness.step()
    harness.core.resume(1)
    for _ in range(6):
        harness.step()
        assert len(harness.plans[-1].rows) == 2
        assert {*harness.plans[-1].rows, *harness.plans[-2].rows} == {100, 200, 300} or len(harness.plans) == 3


def test_a_freeze_is_raised_not_waited_for() -> None:
    core = make_core()
    core.submit(submission(1, prompt(4)))
    block_tables_of(core).pool.take(64)
    with pytest.raises(SchedulerFrozen, match="1 wait"):
        core.plan(1.0)


def test_a_sequence_that_gives_up_its_blocks_alone_leaves_the_step_to_others() -> None:
    """A budget of one token and two that run: at the younger one's turn only its own blocks are left to take."""
    made = ready(4, 2, max_model_len=16)
    harness = Harness(make_core(made, caching=False, max_num_seqs=2, max_num_batched_tokens=1), made)
    for request in (1, 2):
        harness.submit(submission(request, [5, 6], max_tokens=6))
    harness.step()
    harness.core.pause(1)
    while 200 not in harness.reader.streams:
        harness.step()
    harness.core.resume(1)
    harness.run()
    assert harness.core.snapshot().preemptions
    for request in (1, 2):
        assert harness.reader.streams[100 * request] == stream_of([5, 6], 0, 6, frozenset())
    harness.assert_idle()


def test_a_part_kept_for_who_gets_no_blocks_goes_to_the_others() -> None:
    """One prompt token per step, two tenants: the one that waits has its part, and no blocks while the other runs."""
    made = ready(7, 2, max_model_len=20)
    core = make_core(made, caching=False, max_num_seqs=2, max_num_prefill_tokens=1, scheduling_policy="fair")
    harness = Harness(core, made)
    harness.submit(submission(1, [5] * 9, max_tokens=3, tenant="a"))
    harness.step()
    harness.submit(submission(2, [6] * 6, max_tokens=3, tenant="b"))
    harness.run()
    assert {request: len(harness.reader.streams[100 * request]) for request in (1, 2)} == {1: 3, 2: 3}
