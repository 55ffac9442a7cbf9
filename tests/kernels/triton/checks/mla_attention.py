"""Attention to latent vectors, absorbed, against its reference. The cases put NaN wherever no token may look."""

import numpy as np
import pytest
import torch

from troupellm.kernels.kv_codes import decode, encode
from troupellm.kernels.mla_attention import mla_attention
from troupellm.kernels.mla_attention.cases import CASES, TOLERANCES, Case, make_inputs
from troupellm.kernels.mla_attention.reference import mla_attention_reference
from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan
from troupellm.kernels.triton_support import Launch, check_device

DEVICE = check_device()
BY_NAME = {case.name: case for case in CASES}
SMALL = Launch(warps=4, stages=2, constants={"TILE": 16})
MANY_HEADS = Case("many_heads", (40, 3), (1, 1), heads=40, latent=16, rotated=4)


def check(case: Case, *, programs: int | None = None, dtype: torch.dtype | None = None) -> None:
    inputs = make_inputs(case, "cpu", 1)
    tolerance, cache, expected_cache = TOLERANCES[case.dtype], inputs.cache, inputs.cache
    if dtype is not None:
        cache = encode(inputs.cache, dtype)
        expected_cache = decode(cache, torch.float32)
    shape = AttentionShape(
        case.heads, 1, case.latent + case.rotated, case.block_size, kv_dtype=cache.dtype, latent=case.latent
    )  # fmt: skip
    plan = DevicePlan.from_host(
        inputs.plan.block_tables.numpy(), np.array(case.contexts), np.array(case.counts), shape=shape, device=DEVICE,
        decode=SMALL, programs=programs,
    )  # fmt: skip
    query, cache, key_weight, value_weight = (
        part.to(DEVICE) for part in (inputs.query, cache, inputs.key_weight, inputs.value_weight)
    )
    got = mla_attention(query, cache, plan, key_weight, value_weight, inputs.scale)
    expected = mla_attention_reference(
        inputs.query, expected_cache, inputs.plan.block_tables, inputs.items, inputs.key_weight, inputs.value_weight,
        inputs.scale,
    )  # fmt: skip
    torch.testing.assert_close(got.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_equals_the_reference() -> None:
    check(BY_NAME["odd_sizes"], programs=5)


@pytest.mark.parametrize("name", ["decode", "short_prefill", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_equals_the_reference_in_more_cases(name: str) -> None:
    check(BY_NAME[name])


def test_more_heads_than_one_product_takes() -> None:
    check(MANY_HEADS, programs=3)


def test_a_cache_in_fp8() -> None:
    check(BY_NAME["decode"], dtype=torch.float8_e4m3fn)
