"""Prompts of many lengths, as rows that are pooled."""

import random
from array import array

import numpy as np

from troupellm.protocol.messages.worker import NewRow, SamplingState, StepResult
from troupellm.protocol.params.pooling import PoolingState

LENGTHS = (1, 2, 2, 3, 7, 8, 8, 9, 20, 31, 31, 40, 64, 64, 77, 90)


def prompts(vocabulary: int, lengths: tuple[int, ...] = LENGTHS, *, least: int = 0) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(least, vocabulary) for _ in range(length)] for length in lengths]


def new_row(row: int, tokens: list[int], state: PoolingState, blocks: tuple[int, ...] = (0,)) -> NewRow:
    return NewRow(
        row=row,
        epoch=0,
        request_id="",
        token_ids=array("i", tokens).tobytes(),
        num_prompt_tokens=len(tokens),
        sampling=SamplingState(temperature=0.0),
        blocks=(blocks,),
        pooling=state,
    )


def vectors_of(result: StepResult) -> list[np.ndarray]:
    assert not result.errors
    return [np.frombuffer(entry.vector, dtype=np.float32) for entry in result.pooled]
