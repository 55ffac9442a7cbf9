"""Guided sequences wait outside the batch until the worker has built their guides."""

import pytest

from troupellm.actors.scheduler.guide_gate import MOST_READY
from troupellm.protocol.errors import GUIDE_SPENT, INVALID_GUIDE, EngineStopped, InvalidRequest
from troupellm.protocol.params.guide import MOST_PROGRAMS, BuildOutcome
from troupellm.tests.support.scheduler.guided_requests import PROMPT, answer, guided, harness_of
from troupellm.tests.support.scheduler.oracle import Harness, stream_of, submission

SPENT = ("structured_outputs: its lexer is used up", GUIDE_SPENT)
WHOLE = stream_of(PROMPT, 0, 8, frozenset())


def planned(harness: Harness) -> set[int]:
    return {row for plan in harness.plans for row in plan.rows}


def test_other_sequences_run_while_a_guide_is_built() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.submit(submission(2, PROMPT))
    harness.run()
    assert planned(harness) == {200}
    assert harness.core.snapshot().waiting == 1
    (ask,) = harness.core.take_builds()
    assert ask.program.text == "grammar"
    answer(harness, ask)
    harness.run()
    assert harness.reader.streams[100] == WHOLE
    harness.assert_idle()


def test_a_program_is_asked_for_once_for_all_sequences_that_want_it() -> None:
    harness = harness_of()
    harness.submit(guided(1, rows=3))
    harness.submit(guided(2))
    harness.run()
    (ask,) = harness.core.take_builds()
    answer(harness, ask)
    harness.submit(guided(3))
    harness.run()
    assert harness.core.take_builds() == []
    assert set(harness.reader.closed) == {1, 2, 3}
    harness.assert_idle()


def test_a_new_worker_builds_a_guide_before_its_row_is_replayed() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.submit(submission(2, PROMPT))
    harness.plan()
    answer(harness, harness.core.take_builds()[0])
    harness.finish()
    harness.step()
    harness.plan()
    assert 100 in harness.plans[-1].rows
    harness.lose(fault=False)
    before = len(harness.plans)
    for _ in range(3):
        harness.step()
    assert all(plan.rows == (200,) for plan in harness.plans[before:])
    (ask,) = harness.core.take_builds()
    answer(harness, ask)
    harness.run()
    assert harness.reader.streams[100] == WHOLE
    harness.assert_idle()


def test_an_answer_of_the_lost_worker_counts_for_nothing() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.run()
    (ask,) = harness.core.take_builds()
    harness.lose(fault=False)
    answer(harness, ask)
    harness.run()
    assert planned(harness) == set()
    (again,) = harness.core.take_builds()
    assert again.engine_epoch == ask.engine_epoch + 1
    answer(harness, again)
    harness.run()
    assert harness.reader.streams[100] == WHOLE


@pytest.mark.parametrize(("outcome", "asks"), [("lost", 1), ("gone", 0)])
def test_a_lost_question_is_asked_again_and_a_gone_worker_is_not(outcome: BuildOutcome, asks: int) -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.run()
    answer(harness, harness.core.take_builds()[0], outcome)
    harness.run()
    assert len(harness.core.take_builds()) == asks
    assert not harness.reader.closed


def test_a_build_that_takes_too_long_ends_the_requests_that_want_it() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.submit(submission(2, PROMPT))
    harness.run()
    answer(harness, harness.core.take_builds()[0], "late")
    output = harness.core.take_output()
    assert output is not None
    (closed,) = output.closed
    assert isinstance(closed.error, EngineStopped)
    assert closed.error.code == "server_is_overloaded"
    harness.reader.read(output)
    harness.assert_idle()


def test_a_request_that_ends_while_its_guide_is_built_leaves_nothing() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.run()
    (ask,) = harness.core.take_builds()
    harness.abort(1)
    answer(harness, ask)
    harness.run()
    harness.assert_idle()


def test_a_guide_is_not_built_for_a_request_that_has_ended() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.run()
    harness.abort(1)
    assert harness.core.take_builds() == []
    harness.submit(guided(2))
    harness.run()
    assert len(harness.core.take_builds()) == 1


def test_a_paused_reader_and_a_guide_that_is_built_are_waited_for_together() -> None:
    for resumes_first in (True, False):
        harness = harness_of()
        harness.submit(guided(1))
        harness.run()
        (ask,) = harness.core.take_builds()
        harness.core.pause(1)
        for event in ("resume", "built") if resumes_first else ("built", "resume"):
            if event == "resume":
                harness.core.resume(1)
                harness.core.assert_invariants()
            else:
                answer(harness, ask)
            harness.step()
        harness.run()
        assert harness.reader.streams[100] == WHOLE
        harness.assert_idle()


def test_programs_that_the_worker_may_have_dropped_are_built_again() -> None:
    assert MOST_READY < MOST_PROGRAMS
    harness = harness_of()
    for number in range(1, MOST_READY + 2):
        harness.submit(guided(number, f"grammar {number}", max_tokens=1))
        harness.run()
        answer(harness, harness.core.take_builds()[0])
        harness.run()
    for number, asks in ((MOST_READY + 1, 0), (1, 1)):
        harness.submit(guided(100 + number, f"grammar {number}", max_tokens=1))
        harness.run()
        assert len(harness.core.take_builds()) == asks


def test_suspects_whose_guide_is_built_keep_the_scheduler_waiting() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.run()
    answer(harness, harness.core.take_builds()[0])
    harness.step()
    harness.submit(submission(2, PROMPT))
    harness.plan()
    harness.lose(fault=True)
    harness.run()
    for ask in harness.core.take_builds():
        answer(harness, ask)
    harness.run()
    assert harness.reader.streams[100] == WHOLE
    assert set(harness.reader.closed) == {1, 2}


@pytest.mark.parametrize("plans", [1, 2])
def test_a_row_whose_guide_is_used_up_waits_outside_the_batch_for_a_new_one(plans: int) -> None:
    harness = harness_of(max_plans_in_flight=plans)
    harness.submit(guided(1))
    harness.submit(submission(2, PROMPT, max_tokens=40))
    harness.plan()
    answer(harness, harness.core.take_builds()[0])
    for _ in range(4):
        harness.step()
    assert 0 < len(harness.reader.streams[100]) < len(WHOLE)
    harness.oracle.failure = SPENT
    harness.oracle.broken_rows.add(100)
    while harness.oracle.broken_rows or harness.oracle.pending:
        harness.finish() if harness.oracle.pending else harness.plan()
    before = len(harness.plans)
    for _ in range(4):
        harness.step()
    assert {row for plan in harness.plans[before:] for row in plan.rows} == {200}
    (ask,) = harness.core.take_builds()
    answer(harness, ask)
    harness.run()
    assert harness.reader.streams[100] == WHOLE
    assert harness.reader.closed[1].error is None
    harness.assert_idle()


def test_a_row_whose_guide_is_used_up_twice_ends() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.plan()
    answer(harness, harness.core.take_builds()[0])
    harness.oracle.failure = SPENT
    for _ in range(2):
        harness.oracle.broken_rows.add(100)
        harness.run()
        for ask in harness.core.take_builds():
            answer(harness, ask)
    error = harness.reader.closed[1].error
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.code) == ("structured_outputs", INVALID_GUIDE)
    harness.assert_idle()


def test_a_row_whose_guide_is_used_up_ends_with_its_request_when_a_later_row_fails() -> None:
    harness = harness_of()
    harness.submit(guided(1, rows=2, max_tokens=20))
    harness.plan()
    answer(harness, harness.core.take_builds()[0])
    harness.oracle.failure = SPENT
    for rows in ({101}, {100, 101}):
        for _ in range(3):
            harness.step()
        harness.oracle.broken_rows |= rows
        for _ in range(2):
            harness.step()
        assert not harness.oracle.broken_rows
        for ask in harness.core.take_builds():
            answer(harness, ask)
    harness.run()
    error = harness.reader.closed[1].error
    assert isinstance(error, InvalidRequest)
    assert error.code == INVALID_GUIDE
    harness.submit(submission(2, PROMPT))
    harness.run()
    assert harness.reader.streams[200] == WHOLE
    harness.assert_idle()
