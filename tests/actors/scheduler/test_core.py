"""Admission, ends, and the figures that are published."""

import pytest

from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, RequestAborted
from troupellm.tests.support.engines.inside import early_aborts_of
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("settings", "config", "length", "max_tokens", "limit", "got"),
    [
        (ready(max_model_len=16), {}, 16, 1, 16, 16),
        (ready(num_blocks=4, block_size=4, max_model_len=64), {}, 10, 8, 16, 17),
        (ready(), {"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, 9, 1, 8, 9),
    ],
)
def test_a_sequence_that_can_never_fit_is_refused_with_both_numbers(
    settings: object, config: dict[str, object], length: int, max_tokens: int, limit: int, got: int
) -> None:
    harness = Harness(make_core(settings, **config), settings)
    harness.submit(submission(1, [1] * length, max_tokens=max_tokens))
    closed = harness.reader.closed[1]
    assert isinstance(closed.error, ContextLengthExceeded)
    assert (closed.error.limit, closed.error.got) == (limit, got)
    assert str(limit) in closed.error.message
    assert closed.usage.prompt_tokens == length
    assert not harness.step()


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [([], 4, "prompt"), (PROMPT, 0, "max_tokens")])
def test_a_request_with_nothing_to_do_is_refused(prompt: list[int], max_tokens: int, param: str) -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt, max_tokens=max_tokens))
    error = harness.reader.closed[1].error
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert not harness.step()


def test_a_sequence_that_just_fits_the_empty_cache_runs_to_its_end() -> None:
    settings = ready(num_blocks=4, block_size=4, max_model_len=64)
    harness = Harness(make_core(settings), settings)
    harness.submit(submission(1, [1] * 10, max_tokens=7))
    harness.run()
    assert len(harness.reader.streams[100]) == 7
    assert harness.core.snapshot().preemptions == 0


def test_a_request_without_free_blocks_waits_and_is_not_preempted_later() -> None:
    settings = ready(num_blocks=4, block_size=4, max_model_len=16)
    harness = Harness(make_core(settings), settings)
    harness.submit(submission(1, [1] * 8, max_tokens=4))
    harness.submit(submission(2, [2] * 12, max_tokens=4))
    harness.step()
    snapshot = harness.core.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.waiting_tokens) == (1, 1, 12)
    harness.run()
    assert set(harness.reader.closed) == {1, 2}
    assert harness.core.snapshot().preemptions == 0


def test_an_abort_of_a_waiting_request_closes_it_at_once() -> None:
    harness = Harness(make_core(max_num_seqs=1))
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, PROMPT, rows=3))
    harness.step()
    harness.abort(2)
    closed = harness.reader.closed[2]
    assert closed.error is not None
    assert closed.scheduled is None
    assert harness.core.snapshot().waiting == 0
    harness.run()
    assert harness.reader.streams.keys() == {100}


def test_an_abort_between_steps_frees_the_blocks_at_once() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=2))
    harness.step()
    harness.step()
    harness.abort(1)
    assert set(harness.reader.closed) == {1}
    harness.assert_idle()


def test_an_abort_after_the_last_token_does_not_turn_a_good_end_into_an_error() -> None:
    harness = Harness(make_core(max_plans_in_flight=2))
    harness.submit(submission(1, PROMPT, eos_token_ids=frozenset(range(50))))
    while not harness.reader.finished:
        harness.step()
    harness.abort(1)
    harness.run()
    assert harness.reader.closed[1].error is None


def test_unknown_requests_and_rows_are_ignored() -> None:
    core = make_core()
    core.pause(1)
    core.resume(1)
    core.stop_string_met(100)
    core.assert_invariants()
    assert core.take_output() is None


def test_an_abort_that_overtakes_its_request_is_remembered() -> None:
    """Once: what it names is closed for the output actor now, and again when it comes."""
    harness = Harness(make_core())
    harness.core.abort(1)
    early = harness.core.take_output()
    assert early is not None
    assert [(end.request, type(end.error)) for end in early.closed] == [(1, RequestAborted)]
    harness.submit(submission(1, PROMPT))
    assert isinstance(harness.reader.closed[1].error, RequestAborted)
    assert not harness.step(), "nobody reads what would be computed"


def test_an_abort_right_after_the_end_says_nothing_more() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.step()
    harness.core.stop_string_met(100)
    harness.core.abort(1)
    output = harness.core.take_output()
    assert output is not None
    assert [(closed.request, closed.error) for closed in output.closed] == [(1, None)]


def test_no_more_early_aborts_are_remembered_than_can_be_on_their_way() -> None:
    core = make_core()
    for request in range(2000):
        core.abort(request)
    assert len(early_aborts_of(core)) == 1024
    assert 1999 in early_aborts_of(core)


def test_deadlines_of_requests_that_have_ended_are_let_go() -> None:
    harness = Harness(make_core())
    for request in range(1, 300):
        harness.submit(submission(request, PROMPT, max_tokens=1, deadline=1e6 + request))
        harness.run()
    assert len(harness.core._deadlines) < 100


def test_resume_without_pause_changes_nothing() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.core.resume(1)
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 8, frozenset())


def test_a_request_paused_before_it_ran_starts_after_its_resume() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=2))
    harness.core.pause(1)
    harness.core.assert_invariants()
    assert not harness.step()
    harness.core.resume(1)
    harness.run()
    assert harness.reader.streams.keys() == {100, 101}


def test_siblings_of_a_reader_paused_during_the_prefill_start_after_its_resume() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=2))
    harness.plan()
    harness.core.pause(1)
    harness.finish()
    assert not harness.step()
    harness.core.resume(1)
    harness.run()
    assert [harness.reader.streams[100 + fork] for fork in (0, 1)] == [
        stream_of(PROMPT, fork, 8, frozenset()) for fork in (0, 1)
    ]
    harness.assert_idle()


def test_a_request_that_waits_beyond_its_deadline_is_dropped() -> None:
    harness = Harness(make_core(max_num_seqs=1))
    harness.submit(submission(1, PROMPT, deadline=2.0))
    harness.submit(submission(2, PROMPT, deadline=5.0))
    assert harness.core.next_deadline == 2.0
    harness.run()
    assert harness.reader.closed[1].error is None, "it ran before its deadline"
    error = harness.reader.closed[2].error
    assert isinstance(error, RequestAborted)
    assert error.code == "server_is_overloaded"
    assert harness.core.next_deadline is None
    harness.assert_idle()


def test_the_snapshot_counts_steps_tokens_and_blocks() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=3))
    harness.run()
    snapshot = harness.core.snapshot()
    assert (snapshot.steps, snapshot.tokens_generated, snapshot.prefix_queries, snapshot.prefix_hits) == (3, 3, 5, 0)
    assert (snapshot.blocks_total, snapshot.blocks_cached, snapshot.blocks_free) == (64, 2, 62)


def test_the_snapshot_counts_a_paused_reader_once_and_never_as_waiting() -> None:
    settings = ready(num_blocks=5, block_size=4, max_model_len=20)
    harness = Harness(make_core(settings), settings)
    harness.submit(submission(1, PROMPT, max_tokens=12))
    harness.submit(submission(2, [9] * 5))
    harness.step()
    harness.core.pause(2)
    for _ in range(9):  # then its blocks have gone to the one that is read
        harness.step()
    assert harness.core.snapshot().preemptions == 1
    snapshot = harness.core.snapshot()
    assert (snapshot.running, snapshot.paused, snapshot.waiting) == (1, 1, 0)
    harness.core.resume(2)
    snapshot = harness.core.snapshot()
    assert (snapshot.running, snapshot.paused, snapshot.waiting) == (1, 0, 1)
    harness.run()
    harness.assert_idle()


def test_the_newest_paused_reader_gives_up_its_blocks_first() -> None:
    made = ready(num_blocks=10, block_size=4)
    harness = Harness(make_core(made, caching=False), made)
    for request in (1, 2):
        harness.submit(submission(request, [request] * 9, max_tokens=12))
    harness.step()
    for request in (1, 2):
        harness.core.pause(request)
    harness.submit(submission(3, [3] * 19, max_tokens=1))
    harness.run()
    assert harness.core.snapshot().preemptions == 1
    before = len(harness.plans)
    for request in (1, 2):
        harness.core.resume(request)
    harness.run()
    assert [new.row for plan in harness.plans[before:] for new in plan.new_rows] == [200], (
        "the oldest one was preempted"
    )
