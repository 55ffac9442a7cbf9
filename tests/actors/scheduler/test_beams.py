"""Beam search in the scheduler, against the same search written down the plain way."""

import pytest

from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest
from troupellm.tests.support.scheduler.oracle import (
    EOS,
    Harness,
    beam_submission,
    make_core,
    ready,
    stream_of,
    submission,
)
from troupellm.tests.support.scheduler.plain_beams import beams_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STOPS = frozenset({EOS, 1, 7})


def answers(harness: Harness, request: int, width: int) -> list[list[int]]:
    assert harness.reader.closed[request].error is None
    return [harness.reader.streams[100 * request + place] for place in range(width)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("stops", [frozenset(), STOPS])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_answers_are_those_of_the_plain_search(
    width: int, stops: frozenset[int], block_size: int, caching: bool
) -> None:
    made = ready(num_blocks=400 // block_size, block_size=block_size)
    harness = Harness(make_core(made, caching=caching), made)
    for request, penalty in enumerate([1.0, 0.0, 2.0, -1.0], 1):
        prompt = [*PROMPT, request]
        harness.submit(
            beam_submission(
                request,
                prompt,
                width,
                max_tokens=9,
                eos_token_ids=stops,
                length_penalty=penalty,
                early_stopping=request == 2,
            )
        )
    harness.run()
    for request, penalty in enumerate([1.0, 0.0, 2.0, -1.0], 1):
        expected = beams_of([*PROMPT, request], width, 9, stops, penalty, early_stopping=request == 2)
        assert answers(harness, request, width) == expected
        for place, tokens in enumerate(expected):
            finished = harness.reader.finished[100 * request + place]
            ends = tokens[-1] in stops
            assert (finished.reason, finished.hide_last) == (("stop", True) if ends else ("length", False))
        assert harness.reader.closed[request].usage.completion_tokens == sum(map(len, expected))
    harness.assert_idle()


def test_at_the_limit_open_beams_compete_with_those_that_were_enough_to_stop_early() -> None:
    """The last answer that stops the search early comes in the step in which the others reach their limit."""
    made, stops, seen = ready(num_blocks=400), frozenset(range(9)), 0
    for first in range(9, 50):
        for max_tokens in (1, 2, 3):
            prompt = [first, max_tokens + 10]
            harness = Harness(make_core(made), made)
            harness.submit(
                beam_submission(1, prompt, 3, max_tokens=max_tokens, eos_token_ids=stops, early_stopping=True)
            )
            harness.run()
            found = answers(harness, 1, 3)
            assert found == beams_of(prompt, 3, max_tokens, stops, early_stopping=True)
            seen += {tokens[-1] in stops for tokens in found if len(tokens) == max_tokens} == {True, False}
    assert seen


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("prompt", [[2], [2, 3], [1, 3, 1], [3, 3, 3, 1], [1, 1, 1, 2, 2]])
def test_a_search_goes_on_after_a_loss_of_the_worker(prompt: list[int], block_size: int) -> None:
    made = ready(num_blocks=100, block_size=block_size)
    stops = frozenset({EOS, 1})
    right = beams_of(prompt, 2, 12, stops)
    for step in range(1, 13):
        harness = Harness(make_core(made), made)
        harness.submit(beam_submission(1, prompt, 2, max_tokens=12, eos_token_ids=stops))
        for _ in range(step):
            harness.step()
        harness.lose(fault=False)
        harness.run()
        assert answers(harness, 1, 2) == right
        harness.assert_idle()


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_beams_beside_others_under_pressure(plans: int, budget: int) -> None:
    made = ready(num_blocks=12, block_size=2, max_model_len=30)
    core = make_core(made, caching=False, max_plans_in_flight=plans, max_num_batched_tokens=budget, max_num_seqs=4)
    harness = Harness(core, made)
    for request in range(1, 5):
        harness.submit(beam_submission(10 + request, PROMPT[: 4 + request], 3, max_tokens=4, eos_token_ids=STOPS))
        harness.submit(submission(request, PROMPT[:request], max_tokens=14))
    harness.run()
    assert core.snapshot().preemptions
    for request in range(1, 5):
        assert harness.reader.streams[100 * request] == stream_of(PROMPT[:request], 0, 14, frozenset())
        assert answers(harness, 10 + request, 3) == beams_of(PROMPT[: 4 + request], 3, 4, STOPS)
    harness.assert_idle()


def test_beams_share_blocks_and_copy_only_what_they_write() -> None:
    made = ready(num_blocks=200, block_size=16, max_model_len=600)
    harness = Harness(make_core(made, caching=False, max_num_batched_tokens=1024), made)
    prompt = [token % 40 + 2 for token in range(504)]
    harness.submit(beam_submission(1, prompt, 4, max_tokens=20))
    most = 0
    while harness.step():
        most = max(most, harness.core.snapshot().blocks_used)
    assert answers(harness, 1, 4) == beams_of(prompt, 4, 20, frozenset())
    assert most <= 31 + 4 * 2  # the prompt's full blocks once, then at most two blocks per beam
    assert harness.oracle.num_computed == 504 + 19 * 4
    assert max(len(plan.copies) for plan in harness.plans) <= 3
    assert all(not plan.new_rows for plan in harness.plans[3:])  # a step of a beam is a few integers


def test_a_failing_or_aborted_beam_ends_its_search() -> None:
    made = ready()
    harness = Harness(make_core(made), made)
    for request in (1, 2):
        harness.submit(beam_submission(request, PROMPT, 3, max_tokens=12))
    for _ in range(3):
        harness.step()
    harness.oracle.broken_rows.add(101)
    harness.abort(2)
    harness.run()
    assert harness.reader.failed == {101: "logits are NaN"}
    assert harness.reader.closed[1].error is not None
    assert harness.reader.closed[2].error is not None
    harness.assert_idle()


@pytest.mark.parametrize(
    ("width", "fields", "error", "message"),
    [
        (5, {}, InvalidRequest, r"n must be at most max_num_seqs \(4\)"),
        (4, {"max_tokens": 40}, ContextLengthExceeded, "4 beams need"),
    ],
)
def test_searches_that_never_fit(width: int, fields: dict[str, int], error: type[Exception], message: str) -> None:
    made = ready(num_blocks=20)
    harness = Harness(make_core(made, max_num_seqs=4), made)
    harness.submit(beam_submission(1, PROMPT, width, **fields))
    refused = harness.reader.closed[1].error
    assert isinstance(refused, error)
    with pytest.raises(error, match=message):
        raise refused


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("fault", [True, False])
def test_a_search_goes_on_after_its_worker_was_lost(fault: bool, plans: int, caching: bool) -> None:
    for steps in range(14):
        made = ready()
        harness = Harness(make_core(made, caching=caching, max_plans_in_flight=plans, max_num_batched_tokens=8), made)
        for request in (1, 2):
            harness.submit(beam_submission(request, PROMPT[request:], 3, max_tokens=6, eos_token_ids=STOPS))
        harness.submit(submission(3, PROMPT, 4))
        for _ in range(steps):
            harness.step()
        harness.plan()
        harness.lose(fault=fault)
        harness.run()
        for request in (1, 2):
            assert answers(harness, request, 3) == beams_of(PROMPT[request:], 3, 6, STOPS)
        assert answers(harness, 3, 4) == [stream_of(PROMPT, fork, 8, frozenset()) for fork in range(4)]
        harness.assert_idle()
