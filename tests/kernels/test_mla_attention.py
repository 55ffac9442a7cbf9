"""Latent attention in every order of computing equals its definition."""

import pytest
import torch

from troupellm.kernels.mla_attention import expanding_tokens, mla_attention
from troupellm.kernels.mla_attention.cases import CASES, TOLERANCES, Case, Inputs, make_inputs
from troupellm.kernels.mla_attention.reference import mla_attention_reference


def computed(inputs: Inputs) -> torch.Tensor:
    return mla_attention(inputs.query, inputs.cache, inputs.plan, inputs.key_weight, inputs.value_weight, inputs.scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_path_equals_the_reference(case: Case) -> None:
    inputs = make_inputs(case, "cpu", 3)
    expected = mla_attention_reference(
        inputs.query, inputs.cache, inputs.plan.block_tables, inputs.items, inputs.key_weight, inputs.value_weight,
        inputs.scale,
    )  # fmt: skip
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(computed(inputs), expected, atol=tolerance, rtol=tolerance)


def test_the_cases_take_both_orders() -> None:
    inputs = make_inputs(CASES[0], "cpu", 3)
    least = expanding_tokens(inputs.key_weight, inputs.value_weight, 8)
    counts = [count for case in CASES for count in case.counts]
    assert min(counts) < 16 <= 18 < least <= max(counts)


def test_a_model_of_the_real_sizes_expands_long_pieces_only() -> None:
    weights = torch.empty(1, 128, 512), torch.empty(1, 128, 512)
    assert expanding_tokens(*weights, 64) == 171
    assert expanding_tokens(torch.empty(1, 64, 16), torch.empty(1, 64, 16), 8) > 1 << 20


def test_token_by_token_the_result_does_not_depend_on_the_batch() -> None:
    """The rows of a batch, each in a batch of its own, to the bit."""
    case = Case("batch", (30, 11, 3), (1, 2, 20))
    together = computed(make_inputs(case, "cpu", 5, by_token=True))
    whole = make_inputs(case, "cpu", 5, by_token=True)
    begin = 0
    for row, count in enumerate(case.counts):
        alone = whole.plan.__class__(
            whole.plan.block_tables[row : row + 1].numpy(), whole.plan._starts[row : row + 1],
            whole.plan._counts[row : row + 1], block_size=case.block_size, num_kv_heads=1, by_token=True,
        )  # fmt: skip
        query = whole.query[begin : begin + count]
        got = mla_attention(query, whole.cache, alone, whole.key_weight, whole.value_weight, whole.scale)
        assert torch.equal(got, together[begin : begin + count])
        begin += count
