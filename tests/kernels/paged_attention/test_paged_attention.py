"""Paged attention against its reference on every path. The cases put NaN wherever no token may look."""

import shutil

import numpy as np
import pytest
import torch

from troupellm.kernels.cpp import Library
from troupellm.kernels.paged_attention import cpu, paged_attention, prepare
from troupellm.kernels.paged_attention.cases import CASES, WIDE_CASES, Case, all_items, make_inputs, make_sinks
from troupellm.kernels.paged_attention.device_cases import poisoned_cache
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(params=["torch", pytest.param("compiled", marks=needs_compiler)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "load", lambda: None)
    return request.param


@pytest.mark.parametrize("case", [*CASES, *WIDE_CASES], ids=lambda case: case.name)
def test_attention_on_each_path_equals_the_reference(case: Case, path: str) -> None:
    assert prepare() == path
    query, key_cache, value_cache, plan = make_inputs(case, "cpu", 1)
    scale = case.head_dim**-0.5
    options = {"softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}
    expected = paged_attention_reference(
        query, key_cache, value_cache, plan.block_tables, all_items(case), scale=scale, **options
    )
    assert not expected.isnan().any()
    got = paged_attention(query, key_cache, value_cache, plan, scale, **options)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("case", [*CASES, *WIDE_CASES], ids=lambda case: case.name)
def test_by_token_the_result_is_the_same_however_a_row_is_cut(case: Case, path: str) -> None:
    """To the bit: each token alone, and all of them together."""
    query, key_cache, value_cache, plan = make_inputs(case, "cpu", 1)
    options = {"softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}

    def attended(starts: list[int], counts: list[int], rows: list[int], tokens: slice) -> torch.Tensor:
        part = AttentionPlan(
            plan.block_tables.numpy()[rows],
            np.array(starts),
            np.array(counts),
            block_size=case.block_size,
            num_kv_heads=case.kv_heads,
            window=case.window,
            by_token=True,
        )
        return paged_attention(query[tokens], key_cache, value_cache, part, 0.3, **options)

    together = attended(list(case.starts), list(case.counts), list(range(len(case.starts))), slice(None))
    token = 0
    for row, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for place in range(count):
            alone = attended([start + place], [1], [row], slice(token, token + 1))
            assert torch.equal(alone[0], together[token])
            token += 1


@pytest.mark.parametrize("case", [CASES[1], WIDE_CASES[0]], ids=lambda case: case.name)
def test_a_row_with_nan_keys_is_nan_alone(case: Case, path: str) -> None:
    query, key_cache, value_cache, plan = make_inputs(case, "cpu", 1)
    clean = paged_attention(query, key_cache, value_cache, plan, 0.2)
    key_cache[plan.block_tables[3, 0], :, 2] = float("nan")
    got = paged_attention(query, key_cache, value_cache, plan, 0.2)
    assert got[3].isnan().all()
    rest = [0, 1, 2, 4]
    assert torch.equal(got[rest], clean[rest])


@needs_compiler
@pytest.mark.parametrize("codes", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kv_heads", [6, 3, 2])
def test_few_tokens_of_a_row_are_what_each_is_alone(
    kv_heads: int, codes: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, over edges of blocks and tiles; and one that sees no number harms none before it."""
    case = Case("few", (0, 5, 29, 100, 47), (5, 1, 7, 15, 2), 6, kv_heads, 48)
    query, key_cache, value_cache, plan = make_inputs(case, "cpu", 1)
    keys, values = (
        cache if codes == torch.float32 else poisoned_cache(cache, codes) for cache in (key_cache, value_cache)
    )
    options = {"softcap": 0.7, "sinks": torch.randn(6, generator=torch.Generator().manual_seed(2))}

    def attended(*, by_token: bool) -> torch.Tensor:
        each = AttentionPlan(
            plan.block_tables.numpy(),
            np.array(case.starts),
            np.array(case.counts),
            block_size=case.block_size,
            num_kv_heads=kv_heads,
            by_token=by_token,
        )
        assert (len(each.jobs(6 // kv_heads)) == 5) != by_token
        return paged_attention(query, keys, values, each, 0.3, **options)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # more would share out the longest row
    together = attended(by_token=False)
    assert not together.isnan().any()
    assert torch.equal(together, attended(by_token=True))
    if codes == torch.float32:
        values[plan.block_tables[2, 2], :, 0] = float("nan")  # position 32 of the third row: its fourth token's
        together = attended(by_token=False)
        assert torch.equal(together.isnan().all(dim=2).all(dim=1).nonzero()[:, 0], torch.arange(9, 13))
        assert torch.equal(together.nan_to_num(), attended(by_token=True).nan_to_num())


@needs_compiler
def test_threads_that_share_the_heads_of_a_wide_row_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and what is no number in a value stays with the tokens that see it."""
    for case in WIDE_CASES:
        query, key_cache, value_cache, plan = make_inputs(case, "cpu", 1)
        options = {"softcap": case.softcap, "sinks": make_sinks(case, "cpu", 2)}
        found = []
        for threads in (1, 2, 3, 7):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append(paged_attention(query, key_cache, value_cache, plan, 0.2, **options))
        assert all(torch.equal(one, found[0]) for one in found), case.name
    query, key_cache, value_cache, plan = make_inputs(WIDE_CASES[2], "cpu", 1)
    clean = paged_attention(query, key_cache, value_cache, plan, 0.2)
    value_cache[plan.block_tables[0, 1], :, 4] = float("inf")  # position 20 of a prompt's 40
    got = paged_attention(query, key_cache, value_cache, plan, 0.2)
    torch.testing.assert_close(got[:20], clean[:20], atol=1e-5, rtol=1e-5)
    assert not got[20:40].isfinite().any()
    assert torch.equal(got[40:], clean[40:])


def test_extreme_scores_do_not_overflow(path: str) -> None:
    query, key_cache, value_cache, plan = make_inputs(CASES[1], "cpu", 1)
    expected = paged_attention_reference(query, key_cache, value_cache, plan.block_tables, plan.items, scale=200.0)
    got = paged_attention(query, key_cache, value_cache, plan, 200.0)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@needs_compiler
def test_a_wrong_answer_leaves_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "function", lambda self, name, arguments: lambda *given: None)
    assert cpu.load.__wrapped__() is None
