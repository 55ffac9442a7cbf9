"""Latent attention in every order of computing equals its definition."""

from dataclasses import replace

import pytest
import torch

from troupellm.kernels import kv_quant, mla_attention as mla
from troupellm.kernels.mla_attention import expanding_tokens, mla_attention
from troupellm.kernels.mla_attention.cases import CASES, TOLERANCES, Case, Inputs, make_inputs
from troupellm.kernels.mla_attention.reference import mla_attention_reference
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.tests.support.engines.inside import spans_of

WIDE = (
    Case("wide", (0, 5, 70, 31), (1, 1, 1, 1), heads=18, latent=256, rotated=64),
    Case("wide_alone", (70,), (1,), heads=18, latent=256, rotated=64),
    Case("wide_mixed", (9, 0, 33, 12), (1, 30, 3, 20), heads=3, latent=256, rotated=16),
    Case("wide_pieces", (9, 40, 5), (1, 20, 3), heads=3, plain=128, value=128, latent=256, rotated=64),
)
"""As wide as real ones, which are computed where they lie by compiled code."""
LONG_ROWS = next(case for case in CASES if case.name == "long_rows")


def computed(inputs: Inputs, *, batch_invariant: bool = False) -> torch.Tensor:
    return mla_attention(
        inputs.query,
        inputs.cache,
        inputs.plan,
        inputs.key_weight,
        inputs.value_weight,
        inputs.scale,
        batch_invariant=batch_invariant,
    )


@pytest.mark.parametrize("case", [*CASES, *WIDE], ids=lambda case: case.name)
def test_every_path_equals_the_reference(case: Case) -> None:
    inputs = make_inputs(case, "cpu", 3)
    expected = mla_attention_reference(
        inputs.query,
        inputs.cache,
        inputs.plan.block_tables,
        inputs.items,
        inputs.key_weight,
        inputs.value_weight,
        inputs.scale,
    )
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(computed(inputs), expected, atol=tolerance, rtol=tolerance)


def test_long_contexts_are_expanded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "MOST_EXPANDED", 200)  # three heads of four, or four
    monkeypatch.setattr(mla, "MOST_MASKED", 1000)  # 16 tokens of 40
    test_every_path_equals_the_reference(LONG_ROWS)


def test_what_is_no_number_stays_where_it_is_seen() -> None:
    inputs = make_inputs(LONG_ROWS, "cpu", 3)
    clean = computed(inputs)
    inputs.cache[inputs.plan.block_tables[3, 5], 0, 2] = float("inf")  # position 42 of the last row
    got = computed(inputs)
    assert got[54 + 21 :].isnan().all()
    assert torch.equal(got[: 54 + 21], clean[: 54 + 21])


def test_the_cases_take_both_orders() -> None:
    inputs = make_inputs(CASES[0], "cpu", 3)
    (_, plain, latent), value = inputs.key_weight.shape, inputs.value_weight.shape[1]
    least = expanding_tokens(plain, value, latent, 8)
    counts = [count for case in CASES for count in case.counts]
    assert min(counts) < 16 <= 18 < least <= max(counts)


def test_a_model_of_the_real_sizes_expands_long_pieces_only() -> None:
    assert expanding_tokens(128, 128, 512, 64) == 171
    assert expanding_tokens(64, 64, 16, 8) > 1 << 20


@pytest.mark.parametrize("sizes", [{}, {"latent": 256, "rotated": 16}], ids=["small", "wide"])
def test_token_by_token_the_result_does_not_depend_on_the_batch(sizes: dict[str, int]) -> None:
    """The rows of a batch, each in a batch of its own, to the bit."""
    case = Case("batch", (30, 11, 3), (1, 2, 20), **sizes)
    together = computed(make_inputs(case, "cpu", 5, by_token=True), batch_invariant=True)
    whole = make_inputs(case, "cpu", 5, by_token=True)
    begin = 0
    for row, count in enumerate(case.counts):
        parts = (whole.plan.block_tables.numpy(), *spans_of(whole.plan))
        alone = AttentionPlan(
            *(part[row : row + 1] for part in parts), block_size=case.block_size, num_kv_heads=1, by_token=True
        )
        query = whole.query[begin : begin + count]
        got = computed(replace(whole, query=query, plan=alone), batch_invariant=True)
        assert torch.equal(got, together[begin : begin + count])
        begin += count


@pytest.mark.parametrize("case", [CASES[4], WIDE[2]], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_small_numbers_is_read_in_every_order(dtype: torch.dtype, case: Case) -> None:
    inputs = make_inputs(case, "cpu", 3)
    encoded = kv_quant.encode(inputs.cache.nan_to_num(), dtype)
    rounded = kv_quant.decode(encoded, torch.float32)
    expected = computed(replace(inputs, cache=rounded))
    torch.testing.assert_close(computed(replace(inputs, cache=encoded)), expected, atol=2e-5, rtol=2e-5)
