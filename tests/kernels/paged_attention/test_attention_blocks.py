"""Attention of blocks of queries, as prompts have them, over every type of cache. All that no token may see is NaN."""

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from troupellm.kernels.kv_quant import FP8, encode
from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.paged_attention.cases import Case, all_items, make_inputs, make_sinks
from troupellm.kernels.paged_attention.cpu import ROUNDED
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")

TYPES = {"float32": torch.float32, "int8": torch.int8, "fp8": FP8}
MEAN_ERROR = 0.003
"""Root mean square beside that of the result, where queries and weights are rounded by up to 2^-9: each result is the
mean of many values, which is smaller than they are."""

PAST = Case("past", (37, 200, 5), (130, 70, 33), 4, 2, 48)
CASES = (
    *(Case(f"{count}_tokens", (0,), (count,), 2, 2, 64) for count in (17, 31, 32, 33, 63, 64, 65, 128, 130, 300)),
    *(Case(f"heads_of_{size}", (0, 9), (65, 40), 2, 2, size) for size in (16, 32, 48, 80, 112, 128, 208, 256)),
    *(Case(f"groups_of_{group}", (0, 70), (75, 33), 2 * group, 2, 32) for group in (2, 3, 4, 7, 12)),
    PAST,
    *(replace(PAST, name=f"blocks_of_{size}", block_size=size) for size in (5, 64, 100)),
    *(replace(PAST, name=f"window_of_{window}", window=window) for window in (1, 12, 64, 65, 150)),
    replace(PAST, name="soft_cap", softcap=1.5),
    replace(PAST, name="sinks", sinks=True),
    replace(PAST, name="all", kv_heads=1, window=40, softcap=0.8, sinks=True, block_size=7),
)


@functools.cache
def inputs(case: Case, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    return query, encode(keys, TYPES[kind]), encode(values, TYPES[kind]), plan


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_equal_the_reference(case: Case, kind: str) -> None:
    query, keys, values, plan = inputs(case, kind)
    options = {"softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}
    scale = case.head_dim**-0.5
    expected = paged_attention_reference(
        query, keys, values, plan.block_tables, all_items(case), scale=scale, **options
    )
    got = paged_attention(query, keys, values, plan, scale, **options)
    error, largest = got - expected, float(expected.abs().max())
    if kind == "float32":
        assert error.abs().max() < 2e-6 * largest
    else:
        assert error.abs().max() < ROUNDED * largest
        assert error.pow(2).mean().sqrt() < MEAN_ERROR * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_query_sees_its_keys_and_no_other(case: Case, kind: str) -> None:
    """Queries of zeros weigh all keys alike: the result is a mean, which no rounding hides."""
    query, keys, values, plan = inputs(case, kind)
    whole = torch.round(4 * make_inputs(case, "cpu", 1)[2]).clamp(-16, 16)
    whole[..., 0] = torch.where(whole[..., 0].isnan(), whole[..., 0], 127.0)  # the scale of int8 is 1 then
    values, zeros = encode(whole, TYPES[kind]), torch.zeros_like(query)
    expected = paged_attention_reference(zeros, keys, values, plan.block_tables, all_items(case), scale=1.0)
    got = paged_attention(zeros, keys, values, plan, 1.0)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_the_result_does_not_depend_on_how_a_prompt_is_cut(kind: str) -> None:
    """To the bit: nor on the rows beside it, as long as there are enough tokens for a block."""
    case = Case("whole", (0, 20), (300, 50), 4, 2, 48)
    query, keys, values, plan = inputs(case, kind)
    together = paged_attention(query, keys, values, plan, 0.2)
    for first, last in ((0, 130), (130, 163), (163, 300)):
        part = AttentionPlan(
            plan.block_tables.numpy()[:1], np.array([first]), np.array([last - first]), block_size=16, num_kv_heads=2
        )
        assert torch.equal(paged_attention(query[first:last], keys, values, part, 0.2), together[first:last])


@pytest.mark.parametrize("kind", TYPES)
def test_nan_stays_where_it_is_seen(kind: str) -> None:
    case = Case("whole", (0,), (150,), 2, 1, 32)
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    clean = paged_attention(query, encode(keys, TYPES[kind]), encode(values, TYPES[kind]), plan, 0.2)
    keys[plan.block_tables[0, 6], :, 4] = float("nan")  # position 100
    got = paged_attention(query, encode(keys, TYPES[kind]), encode(values, TYPES[kind]), plan, 0.2)
    assert got[100:].isnan().all()
    assert torch.equal(got[:100], clean[:100])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kind", TYPES)
def test_a_value_that_is_no_number_stays_where_it_is_seen(kind: str, window: int | None) -> None:
    case = Case("whole", (0,), (150,), 2, 1, 32, window=window)
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    clean = paged_attention(query, encode(keys, TYPES[kind]), encode(values, TYPES[kind]), plan, 0.2)
    values[plan.block_tables[0, 6], :, 4] = float("nan")  # position 100
    got = paged_attention(query, encode(keys, TYPES[kind]), encode(values, TYPES[kind]), plan, 0.2)
    sees = torch.zeros(150, dtype=torch.bool)
    sees[100 : 100 + (window or 50)] = True
    assert got[sees].isnan().all()
    torch.testing.assert_close(got[~sees], clean[~sees], atol=2e-2, rtol=2e-2)


def test_large_scores_stay_exact() -> None:
    query, keys, values, plan = inputs(PAST, "float32")
    expected = paged_attention_reference(query, keys, values, plan.block_tables, all_items(PAST), scale=30.0)
    got = paged_attention(query, keys, values, plan, 30.0)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_large_scores_do_not_overflow(kind: str) -> None:
    query, keys, values, plan = inputs(PAST, kind)
    got = paged_attention(query, keys, values, plan, 300.0)
    assert got.isfinite().all()
