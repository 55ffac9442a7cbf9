"""A beam's step in the worker: rows that go on from each other with given tokens."""

import numpy as np
import pytest

from troupellm.models.batch.row_table import PlanError
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import (
    BlockCopy,
    NewRow,
    RowChange,
    RowFork,
    SamplingState,
    StepPlan,
    StepResult,
)
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)  # two blocks of four and a half


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ModelWorker:
    worker = ModelWorker(write_tiny_model(tmp_path_factory.mktemp("tiny")))
    config = {"max_model_len": 48, "num_gpu_blocks_override": 16, "block_size": 4, "device": "cpu"}
    worker.load(EngineConfig.from_flat(config), lambda _: None)
    return worker


def new_row(row: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> NewRow:
    return NewRow(
        row=row,
        epoch=0,
        request_id="",
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        num_prompt_tokens=10,
        sampling=SamplingState(temperature=0.0, logprobs=2),
        blocks=(blocks,),
    )


def step(worker: ModelWorker, spans: dict[int, tuple[int, int]], **parts: object) -> StepResult:
    plan = StepPlan(
        step=1,
        engine_epoch=0,
        rows=tuple(spans),
        epochs=(0,) * len(spans),
        starts=tuple(start for start, _ in spans.values()),
        counts=tuple(count for _, count in spans.values()),
        **parts,
    )
    return worker.collect(worker.launch(plan))


def answer(worker: ModelWorker, tokens: tuple[int, ...]) -> tuple[int, bytes]:
    """Next token and its log-probabilities, computed anew."""
    result = step(worker, {99: (0, len(tokens))}, new_rows=(new_row(99, tokens, (12, 13, 14, 15)),))
    step(worker, {}, freed_rows=(99,))
    return result.tokens[0], result.logprobs[0].logprobs


def near(found: bytes, expected: bytes) -> bool:
    return np.allclose(np.frombuffer(found, "<f4"), np.frombuffer(expected, "<f4"), atol=1e-5)


def test_two_beams_change_places(worker: ModelWorker) -> None:
    first, second = (*PROMPT, 40), (*PROMPT, 41)
    step(worker, {0: (0, 11), 1: (0, 11)}, new_rows=(new_row(0, first, (0, 1, 2)), new_row(1, second, (3, 4, 5))))
    crossed = step(worker, {0: (11, 1), 1: (11, 1)}, forks=(RowFork(0, 1, 11, 50), RowFork(1, 0, 11, 51)))
    for index, tokens in enumerate([(*second, 50), (*first, 51)]):
        token, logprobs = answer(worker, tokens)
        assert crossed.tokens[index] == token
        assert near(crossed.logprobs[index].logprobs, logprobs)
    step(worker, {}, freed_rows=(0, 1))


def test_children_of_one_parent_write_into_blocks_of_their_own(worker: ModelWorker) -> None:
    step(worker, {0: (0, 10)}, new_rows=(new_row(0, PROMPT, (0, 1, 2)),))
    children = new_row(1, (*PROMPT, 41), (0, 1, 3))
    result = step(
        worker,
        {1: (10, 1), 0: (10, 1)},
        new_rows=(children,),
        forks=(RowFork(0, 0, 10, 40),),
        changes=(RowChange(row=0, dropped_blocks=1, appended_blocks=((5,),)),),
        copies=(BlockCopy(0, 2, 3), BlockCopy(0, 2, 5)),
    )
    for row, token in enumerate(result.tokens):
        assert token == answer(worker, (*PROMPT, 41 - row))[0]
    step(worker, {}, freed_rows=(0, 1))


def test_forks_that_cannot_be(worker: ModelWorker) -> None:
    step(worker, {0: (0, 10)}, new_rows=(new_row(0, PROMPT, (0, 1, 2)),))
    with pytest.raises(PlanError, match="row 7 is not known"):
        step(worker, {0: (10, 1)}, forks=(RowFork(0, 7, 10, 1),))
    with pytest.raises(PlanError, match="12 tokens of row 0, which has fewer"):
        step(worker, {0: (10, 1)}, forks=(RowFork(0, 0, 12, 1),))
    with pytest.raises(PlanError, match="row 0: 4 of 3 blocks cannot be dropped"):
        step(worker, {0: (10, 1)}, changes=(RowChange(row=0, dropped_blocks=4),))
    step(worker, {}, freed_rows=(0,))
