"""Keys and values in int8 and fp8: what is kept, and how near attention over them is to that over a plain cache."""

import functools

import numpy as np
import pytest
import torch

from troupellm.kernels.kv_quant import FP8, as_bytes, decode, encode, row_width
from troupellm.kernels.paged_attention import cpu, paged_attention
from troupellm.kernels.paged_attention.cases import CASES, Case, all_items, make_inputs, make_sinks
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write

TYPES = {"int8": torch.int8, "fp8": FP8}
ERRORS = {"int8": 0.02, "fp8": 0.08}
"""Of attention over normal numbers, root mean square beside that of the result with a plain cache."""


def plan_of(case: Case, plan: AttentionPlan) -> AttentionPlan:
    """The plan of a case as --batch-invariant has it."""
    return AttentionPlan(
        plan.block_tables.numpy(),
        np.array(case.starts),
        np.array(case.counts),
        block_size=case.block_size,
        num_kv_heads=case.kv_heads,
        window=case.window,
        by_token=True,
    )


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_come_back_to_the_nearest(kind: str) -> None:
    x = random_rows(7, 3, 24) * 3
    kept = encode(x, TYPES[kind])
    assert kept.dtype == TYPES[kind]
    assert kept.shape[-1] == row_width(24, TYPES[kind])
    back = decode(kept, torch.float32)
    if kind == "int8":
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        assert torch.all((back - x).abs() <= step * 0.5001)
    else:
        assert torch.all((back - x).abs() <= (x.abs() / 16).clamp(min=2**-10))
    assert torch.equal(decode(encode(torch.zeros(1, 24), TYPES[kind]), torch.float32), torch.zeros(1, 24))
    x[2, 1, 3] = float("nan")
    assert decode(encode(x, TYPES[kind]), torch.float32)[2, 1].isnan().any()


def test_fp8_keeps_to_its_range() -> None:
    assert decode(encode(torch.tensor([[1e9, -1e9]]), FP8), torch.float32).tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("kind", TYPES)
def test_writing_touches_the_named_slots_only(kind: str) -> None:
    dtype, slots = TYPES[kind], torch.tensor([13, 2, 7])
    caches = [torch.zeros(4, 2, 5, row_width(16, dtype), dtype=dtype) for _ in range(2)]
    expected = [as_bytes(cache).clone() for cache in caches]
    new = random_rows(2, 3, 2, 16)
    for token, slot in enumerate(slots.tolist()):
        for side in range(2):
            expected[side][slot // 5, :, slot % 5] = as_bytes(encode(new[side, token], dtype))
    kv_write(new[0], new[1], caches[0], caches[1], kv_rows(slots, 2, 5))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(as_bytes(cache), wanted)


@functools.cache
def references(case: Case, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the cache in codes, and over the plain one."""
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    options = {"scale": case.head_dim**-0.5, "softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}
    caches = (encode(keys, TYPES[kind]), encode(values, TYPES[kind])), (keys, values)
    encoded, plain = (
        paged_attention_reference(query, *both, plan.block_tables, all_items(case), **options) for both in caches
    )
    return encoded, plain


@pytest.fixture(params=["compiled", "torch", "token by token"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "compiled":
        monkeypatch.setattr(cpu, "load", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_the_reference_and_stays_near_the_plain_cache(case: Case, kind: str, path: str) -> None:
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    options = {"softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}
    caches = encode(keys, TYPES[kind]), encode(values, TYPES[kind])
    expected, plain = references(case, kind)
    if path == "token by token":
        plan = plan_of(case, plan)
    got = paged_attention(query, *caches, plan, case.head_dim**-0.5, **options)
    rounded = cpu.ROUNDED * float(expected.abs().max()) if path == "compiled" else 0.0
    torch.testing.assert_close(got, expected, atol=max(case.tolerance, rounded), rtol=case.tolerance)
    plain = plain.float()
    error = (got.float() - plain).pow(2).mean().sqrt() / plain.pow(2).mean().sqrt()
    assert error < ERRORS[kind]
