"""Wrong optional columns of a result: a worker fault, and nothing of the result is taken in."""

import struct
from typing import Any

import msgspec
import pytest

from troupellm.actors.scheduler.plans import BrokenResult
from troupellm.protocol.messages.worker import RowLogprobs, StepResult
from troupellm.tests.support.scheduler.oracle import Harness, make_core, stream_of, submission

PROMPT = [1, 2, 3, 4, 5]
WIDTH = 50
"""Of the oracle's vocabulary."""
RIGHT = RowLogprobs(
    row=100,
    position=len(PROMPT),
    width=2,
    token_ids=struct.pack("<2i", 7, WIDTH - 1),
    logprobs=struct.pack("<2f", -1.0, -2.0),
    ranks=struct.pack("<i", 3),
)


def planned() -> Harness:
    """With the first step of one request under way."""
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.plan()
    return harness


def answer(harness: Harness, **changes: Any) -> StepResult:
    """The oracle's, altered."""
    return msgspec.structs.replace(harness.oracle.collect(), **changes)


@pytest.mark.parametrize("column", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"width": 0, "token_ids": b"", "logprobs": b""},
        {"width": -2},
        {"width": 3},
        {"token_ids": struct.pack("<i", 7)},
        {"logprobs": struct.pack("<3f", -1.0, -2.0, -3.0)},
        {"ranks": b""},
        {"ranks": b"\1\0\0"},
        {"ranks": struct.pack("<2i", 1, 1)},
        {"other_ranks": struct.pack("<2i", 1, 2)},
        {"token_ids": struct.pack("<2i", 7, -1)},
        {"token_ids": struct.pack("<2i", WIDTH, 7)},
    ],
)
def test_log_probabilities_that_nobody_can_read_are_a_worker_fault(column: str, wrong: dict[str, Any]) -> None:
    harness = planned()
    with pytest.raises(BrokenResult, match="log-probabilities"):
        harness.core.update(answer(harness, **{column: (RIGHT, msgspec.structs.replace(RIGHT, **wrong))}), 1.0)
    harness.core.assert_invariants()
    assert harness.core.plan(2.0) is None
    harness.lose(fault=False)
    harness.run()
    assert harness.reader.streams == {100: stream_of(PROMPT, 0, 8, frozenset())}
    harness.assert_idle()


@pytest.mark.parametrize("other_ranks", [b"", struct.pack("<i", 12)])
def test_log_probabilities_that_fit_are_shown_as_they_are(other_ranks: bytes) -> None:
    harness = planned()
    entry = msgspec.structs.replace(RIGHT, other_ranks=other_ranks)
    assert harness.core.update(answer(harness, logprobs=(entry,)), 1.0).logprobs == (entry,)


def test_a_row_that_is_complete_without_a_guide_is_a_worker_fault() -> None:
    harness = planned()
    with pytest.raises(BrokenResult, match="guide"):
        harness.core.update(answer(harness, finished=(100,)), 1.0)
