"""The vector of a prompt from its hidden states, in one span or several, with and without unit length."""

import pytest
import torch
from torch import Tensor

from troupellm.models.runner.pooler import Pooler, pool_whole
from troupellm.protocol.params.pooling import PoolingState, PoolingType

HIDDEN = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, -1.0], [6.0, 9.0]])
EXPECTED: dict[PoolingType, list[float]] = {"MEAN": [3.0, 3.0], "CLS": [3.0, 0.0], "LAST": [6.0, 9.0]}


def pooled(kind: PoolingType, cuts: list[int], *, activation: bool = False, dimensions: int = 0) -> list[float]:
    """The vector of a row whose prompt comes in spans that end at `cuts`."""
    pooler = Pooler()
    pooler.add_row(5, PoolingState(task="embed", pooling_type=kind, activation=activation, dimensions=dimensions))
    for start, end in zip([0, *cuts], [*cuts, len(HIDDEN)], strict=True):
        first, count = pooler.wanted(5, start, end - start, ends=end == len(HIDDEN))
        pooler.take(5, HIDDEN[start + first : start + first + count])
    (found,), errors = pooler.finish([5], [7])
    assert (found.row, errors) == (7, [])
    return list(memoryview(found.vector).cast("f"))


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_vector_without_unit_length_is_the_pooled_hidden_state(kind: PoolingType, cuts: list[int]) -> None:
    assert pooled(kind, cuts) == pytest.approx(EXPECTED[kind])


def test_an_embedding_has_unit_length_and_its_first_numbers_too() -> None:
    assert pooled("MEAN", [2], activation=True) == pytest.approx([0.5**0.5, 0.5**0.5])
    assert pooled("MEAN", [2], activation=True, dimensions=1) == pytest.approx([1.0])


@pytest.mark.parametrize("kind", EXPECTED)
def test_whole_prompts_are_pooled_as_prompts_in_spans(kind: PoolingType) -> None:
    both = pool_whole(torch.cat((HIDDEN, HIDDEN[:2], HIDDEN)), [4, 2], kind)
    first: Tensor = {"MEAN": HIDDEN[:2].mean(0), "CLS": HIDDEN[0], "LAST": HIDDEN[1]}[kind]
    assert both.tolist() == [EXPECTED[kind], first.tolist()]


def test_a_vector_that_is_not_finite_fails_its_row_only() -> None:
    states = [PoolingState(task="embed", pooling_type="LAST")] * 2
    found, errors = Pooler().vectors([3, 4], states, torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]))
    assert ([one.row for one in found], [error.row for error in errors]) == ([3], [4])
