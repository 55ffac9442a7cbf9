"""Attention to latent vectors, absorbed, against its reference. The cases put NaN wherever no token may look."""

import numpy as np
import pytest
import torch

from troupellm.kernels.common.triton import Launch, check_device
from troupellm.kernels.kv_quant import decode, encode
from troupellm.kernels.mla_attention import mla_attention
from troupellm.kernels.mla_attention.cases import CASES, TOLERANCES, Case, make_inputs
from troupellm.kernels.mla_attention.reference import mla_attention_reference
from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, MlaConfig, RopeConfig
from troupellm.models.gpu.batch import DeviceSpans, triton_planner
from troupellm.models.layers.cache_layout import cache_layout

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
    )
    plan = DevicePlan.from_host(
        inputs.plan.block_tables.numpy(),
        np.array(case.contexts),
        np.array(case.counts),
        shape=shape,
        device=DEVICE,
        decode=SMALL,
        programs=programs,
    )
    query, cache, key_weight, value_weight = (
        part.to(DEVICE) for part in (inputs.query, cache, inputs.key_weight, inputs.value_weight)
    )
    got = mla_attention(query, cache, plan, key_weight, value_weight, inputs.scale)
    expected = mla_attention_reference(
        inputs.query,
        expected_cache,
        inputs.plan.block_tables,
        inputs.items,
        inputs.key_weight,
        inputs.value_weight,
        inputs.scale,
    )
    torch.testing.assert_close(got.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_latent_attention_equals_the_reference() -> None:
    check(BY_NAME["odd_sizes"], programs=5)


@pytest.mark.parametrize(
    "name", ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in ("short_prefill", "bfloat16"))]
)
def test_equals_the_reference_in_more_cases(name: str) -> None:
    check(BY_NAME[name])


def test_more_heads_than_one_product_takes() -> None:
    check(MANY_HEADS, programs=3)


def test_a_cache_in_fp8() -> None:
    check(BY_NAME["decode"], dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", [(0, 2, 1, 3), (1,)])
def test_long_rows_are_expanded_and_the_others_absorbed(rows: tuple[int, ...]) -> None:
    """Rows in the order of a step's spans: those with one token first."""
    case = BY_NAME["long_rows"]
    inputs = make_inputs(case, "cpu", 1)
    mla = MlaConfig(latent=case.latent, rotated=case.rotated, plain=case.plain, value=case.value, query_latent=None)
    config = DecoderConfig(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        layers=(
            LayerShape(
                num_heads=case.heads,
                num_kv_heads=1,
                head_dim=case.latent + case.rotated,
                rope=RopeConfig(),
                intermediate_size=32,
            ),
        ),
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
        mla=mla,
    )
    order = np.array(rows)
    kept = np.repeat(np.isin(np.arange(4), order), case.counts)
    counts = np.where(np.isin(np.arange(4), order), case.counts, 0)
    stops = np.cumsum(counts)
    known = np.stack((stops - counts, stops, np.array(case.contexts) + case.counts))[:, order]
    owners = np.repeat(np.argsort(order), counts[np.sort(order)])
    spans = DeviceSpans(
        *torch.tensor(known, dtype=torch.int32, device=DEVICE),
        num_tokens=int(stops[-1]),
        decode_rows=1,
        owners=torch.tensor(owners, device=DEVICE),
        known=known,
    )
    tables = inputs.plan.block_tables[order].to(DEVICE)
    view = cache_layout(config).views[0]
    plan = triton_planner(config, case.block_size, torch.float32, invariant=False)(tables, spans, view)
    assert isinstance(plan, DevicePlan)
    assert [row.tokens.stop - row.tokens.start for row in plan.long] == [
        case.counts[row] for row in (1, 3) if row in rows
    ]
    assert plan.num_tokens == sum(case.counts[row] for row in (0, 2) if row in rows)
    query, cache, key_weight, value_weight = (
        part.to(DEVICE) for part in (inputs.query[kept], inputs.cache, inputs.key_weight, inputs.value_weight)
    )
    got = mla_attention(query, cache, plan, key_weight, value_weight, inputs.scale)
    expected = mla_attention_reference(
        inputs.query,
        inputs.cache,
        inputs.plan.block_tables,
        inputs.items,
        inputs.key_weight,
        inputs.value_weight,
        inputs.scale,
    )[kept]
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=2e-5)
