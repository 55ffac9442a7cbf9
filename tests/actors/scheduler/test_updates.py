"""Reading results: stop rules, several tokens per row, log-probabilities, and results that fit nothing."""

import struct
from typing import Any

import msgspec
import pytest

from troupellm.actors.scheduler.plans import BrokenResult
from troupellm.protocol.messages.metrics import RequestStats, StepStats
from troupellm.protocol.messages.worker import RowError, RowLogprobs, SamplingState, StepResult
from troupellm.tests.support.scheduler.oracle import EOS, Harness, make_core, ready, stream_of, submission

PROMPT = [1, 2, 3, 4, 5]


def result(harness: Harness, **changes: object) -> StepResult:
    """The oracle's answer to the oldest plan, altered."""
    return msgspec.structs.replace(harness.oracle.collect(), **changes)


def test_max_tokens_ends_with_length() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=3))
    harness.run()
    finished = harness.reader.finished[100]
    assert (finished.reason, finished.stop_token_id, finished.hide_last) == ("length", None, False)
    closed = harness.reader.closed[1]
    assert (closed.usage.prompt_tokens, closed.usage.completion_tokens, closed.error) == (5, 3, None)
    assert closed.scheduled is not None
    assert closed.first_token is not None
    assert closed.scheduled < closed.first_token


def test_the_context_ends_a_sequence_with_length() -> None:
    settings = ready(max_model_len=8)
    harness = Harness(make_core(settings), settings)
    harness.submit(submission(1, PROMPT, max_tokens=50))
    harness.run()
    assert len(harness.reader.streams[100]) == 3
    assert harness.reader.finished[100].reason == "length"


@pytest.mark.parametrize("kind", ["eos_token_ids", "stop_token_ids"])
def test_an_end_or_stop_token_ends_with_stop_and_is_hidden(kind: str) -> None:
    stream = stream_of(PROMPT, 0, 8, frozenset())
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, **{kind: frozenset({stream[2]})}))
    harness.run()
    finished = harness.reader.finished[100]
    assert harness.reader.streams[100] == stream[:3]
    assert (finished.reason, finished.hide_last) == ("stop", True)
    assert finished.stop_token_id == (stream[2] if kind == "stop_token_ids" else None)


def test_a_stop_token_on_the_last_position_is_a_stop() -> None:
    stream = stream_of(PROMPT, 0, 3, frozenset())
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=3, stop_token_ids=frozenset({stream[2]})))
    harness.run()
    assert harness.reader.finished[100].reason == "stop"


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    stream = stream_of(PROMPT, 0, 8, frozenset())
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, min_tokens=4, eos_token_ids=frozenset(stream)))
    harness.run()
    assert harness.reader.streams[100] == stream[:4]


@pytest.mark.parametrize("burst", [2, 3, 7])
def test_several_tokens_per_row_and_nothing_after_the_stop(burst: int) -> None:
    stream = stream_of(PROMPT, 0, 8, frozenset())
    for stop in stream:
        harness = Harness(make_core(), burst=burst)
        harness.submit(submission(1, PROMPT, eos_token_ids=frozenset({stop})))
        harness.run()
        assert harness.reader.streams[100] == stream[: stream.index(stop) + 1]
        harness.assert_idle()


def test_a_stop_string_ends_its_sequence_only() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=2, max_tokens=6))
    harness.step()
    harness.step()
    harness.core.stop_string_met(100)
    harness.core.stop_string_met(100)
    harness.core.stop_string_met(12345)
    harness.run()
    assert len(harness.reader.streams[100]) == 2
    assert set(harness.reader.finished) == {101}
    assert harness.reader.closed[1].error is None
    assert harness.reader.closed[1].usage.completion_tokens == 8


def test_a_row_error_fails_that_request_only() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=2))
    harness.submit(submission(2, [9, *PROMPT]))
    harness.step()
    harness.step()
    harness.oracle.broken_rows.add(101)
    harness.run()
    assert harness.reader.failed == {101: "logits are NaN"}
    error = harness.reader.closed[1].error
    assert error is not None
    assert (error.code, error.message) == ("engine_request_failed", "logits are NaN")
    assert harness.reader.streams[200] == stream_of([9, *PROMPT], 0, 8, frozenset())
    harness.assert_idle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": (-1, 5)},
        {"tokens": (50, 5)},
        {"tokens": (2**31, 5)},
        {"token_counts": (0, 2)},
        {"token_counts": (0, 1), "tokens": (5,)},
        {"rows": (200, 777)},
        {"rows": (200, 100)},
        {"epochs": (0, 1)},
        {"rows": (100, 200, 777), "epochs": (0, 0, 0), "token_counts": (1, 1, 1), "tokens": (5, 6, 7)},
    ],
    ids=[
        "below",
        "at the width",
        "beyond 32 bits",
        "shifted",
        "without a token",
        "a row left out",
        "another order",
        "another epoch",
        "a foreign row",
    ],
)
def test_nonsense_is_a_worker_fault_and_nothing_of_it_is_taken_in(wrong: dict[str, Any]) -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, [9, *PROMPT]))
    harness.plan()
    with pytest.raises(BrokenResult):
        harness.core.update(result(harness, **{"tokens": (5, 6), **wrong}), 1.0)
    harness.core.assert_invariants()
    assert harness.core.plan(2.0) is None
    harness.oracle.pending.clear()
    harness.lose(fault=False)
    harness.run()
    assert harness.reader.streams == {
        100: stream_of(PROMPT, 0, 8, frozenset()),
        200: stream_of([9, *PROMPT], 0, 8, frozenset()),
    }
    harness.assert_idle()


def test_stale_epochs_unknown_steps_and_older_engines_are_dropped_and_counted() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.plan()
    given = harness.oracle.collect()
    for wrong in ({"step": 77}, {"engine_epoch": 1}):
        output = harness.core.update(msgspec.structs.replace(given, **wrong), 1.0)
        assert output.rows == ()
    assert harness.core.num_dropped_results == 2
    assert harness.core.update(given, 1.0).rows == (100,)
    assert harness.core.update(given, 1.0).rows == ()
    assert harness.core.num_dropped_results == 3
    harness.core.assert_invariants()


@pytest.mark.parametrize("wrong", [{"token_counts": ()}, {"tokens": (1, 2, 3)}, {"rows": ()}])
def test_columns_that_do_not_fit_are_a_worker_fault(wrong: dict[str, object]) -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.plan()
    with pytest.raises(BrokenResult, match="columns"):
        harness.core.update(result(harness, **wrong), 1.0)


def test_a_result_that_overtakes_another_is_a_worker_fault() -> None:
    harness = Harness(make_core(max_plans_in_flight=2))
    harness.submit(submission(1, PROMPT))
    harness.plan()
    harness.plan()
    harness.oracle.collect()
    with pytest.raises(BrokenResult, match="overtook"):
        harness.core.update(harness.oracle.collect(), 1.0)


def test_an_abort_with_a_plan_in_flight_closes_at_once_and_frees_when_it_returns() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.step()
    harness.plan()
    harness.abort(1)
    harness.abort(1)
    closed = harness.reader.closed[1]
    assert harness.core.snapshot().blocks_used > 0
    output = harness.finish()
    assert (output.rows, output.closed) == ((), ())
    assert closed.error is not None
    assert closed.error.code == "request_aborted"
    assert closed.usage.completion_tokens == 1
    harness.assert_idle()


def logprobs(row: int, position: int, tokens: list[int]) -> RowLogprobs:
    count = len(tokens)
    return RowLogprobs(
        row=row,
        position=position,
        width=2,
        token_ids=struct.pack(f"<{2 * count}i", *(token for token in tokens for _ in range(2))),
        logprobs=struct.pack(f"<{2 * count}f", *range(2 * count)),
        ranks=struct.pack(f"<{count}i", *range(count)),
    )


def test_logprobs_of_tokens_after_the_stop_are_cut_off() -> None:
    harness = Harness(make_core(), burst=4)
    stream = stream_of(PROMPT, 0, 4, frozenset())
    harness.submit(submission(1, PROMPT, eos_token_ids=frozenset({stream[1]})))
    harness.plan()
    entries = (logprobs(100, 5, stream), logprobs(777, 5, stream))
    (entry,) = harness.core.update(result(harness, logprobs=entries), 1.0).logprobs
    assert (entry.row, entry.position, entry.width) == (100, 5, 2)
    kept = stream.index(stream[1]) + 1
    assert entry.token_ids == logprobs(100, 5, stream[:kept]).token_ids
    assert len(entry.logprobs) == 8 * kept
    assert len(entry.ranks) == 4 * kept


def test_prompt_logprobs_are_shown_once_though_the_prompt_is_computed_twice() -> None:
    settings = ready(num_blocks=4, block_size=4, max_model_len=16)
    harness = Harness(make_core(settings), settings)
    asks = SamplingState(prompt_logprobs=0)
    harness.submit(submission(1, [8, 8, 8], max_tokens=13))
    harness.submit(submission(2, PROMPT, max_tokens=8, sampling=asks))
    shown: list[tuple[int, int]] = []
    while harness.plan() is not None:
        plan = harness.plans[-1]
        again = tuple(logprobs(200, 1, PROMPT[1:]) for new in plan.new_rows if new.row == 200)
        output = harness.core.update(result(harness, prompt_logprobs=again), harness.now)
        shown.extend((entry.position, len(entry.ranks) // 4) for entry in output.prompt_logprobs)
    assert harness.core.snapshot().preemptions > 0
    assert shown == [(1, 4)]


def test_statistics_of_steps_and_requests() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=3, eos_token_ids=frozenset({EOS})))
    harness.run()
    harness.submit(submission(2, PROMPT, max_tokens=3, arrival=harness.now))
    harness.step()
    harness.abort(2)
    harness.run()
    harness.submit(submission(3, PROMPT))
    harness.oracle.broken_rows.add(300)
    harness.run()
    stats = harness.core.take_stats()
    steps = [entry for entry in stats if isinstance(entry, StepStats)]
    requests = [entry for entry in stats if isinstance(entry, RequestStats)]
    assert [(step.prefill_tokens, step.decode_tokens, step.new_tokens) for step in steps] == [
        (5, 0, 1),
        (0, 1, 1),
        (0, 1, 1),
        (1, 0, 1),
        (1, 0, 0),
    ]
    assert [step.inter_token_seconds for step in steps[:3]] == [(), ((3.0, 1),), ((3.0, 1),)]
    assert [(step.prefix_queries, step.prefix_hits) for step in steps] == [(5, 0), (0, 0), (0, 0), (5, 4), (5, 4)]
    assert [request.reason for request in requests] == ["length", "abort", "error"]
    first = requests[0]
    assert (first.n, first.prompt_tokens, first.completion_tokens, first.max_tokens) == (1, 5, 3, 3)
    assert first.queue_seconds == 1.0
    assert first.prefill_seconds == 2.0
    assert first.decode_seconds == 6.0
    assert first.total_seconds == 9.0
    assert harness.core.take_stats() == []


def test_times_between_tokens_are_told_apart() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, [9, *PROMPT]))
    harness.step()
    harness.step()
    harness.core.pause(1)
    harness.step()
    harness.core.resume(1)
    harness.step()
    gaps = [sorted(entry.inter_token_seconds) for entry in harness.core.take_stats() if isinstance(entry, StepStats)]
    assert gaps == [[], [(3.0, 2)], [(3.0, 1)], [(3.0, 1), (6.0, 1)]]


def test_an_error_for_a_row_that_ended_meanwhile_is_dropped() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.plan()
    harness.abort(1)
    assert 1 in harness.reader.closed
    output = harness.core.update(result(harness, errors=(RowError(100, "late"),)), 1.0)
    assert (output.failed, output.closed) == ((), ())
    assert harness.core.num_dropped_results == 1
