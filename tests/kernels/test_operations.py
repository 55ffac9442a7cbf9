"""Every operation against its reference, over the cases that the benchmarks use too."""

import pytest
import torch

from troupellm.kernels.gated_act import cases as gate_cases, gelu_mul, silu_mul
from troupellm.kernels.gated_act.reference import gelu_mul_reference, silu_mul_reference
from troupellm.kernels.linear import PackedLinear, cases as linear_cases, linear, pack
from troupellm.kernels.linear.reference import linear_reference
from troupellm.kernels.rms_norm import add_rms_norm, cases as rms_norm_cases, rms_norm
from troupellm.kernels.rms_norm.reference import rms_norm_reference
from troupellm.kernels.rope_kv_write import kv_write_cases, rope_cases
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write
from troupellm.kernels.rope_kv_write.rope import rope
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", rms_norm_cases.CASES, ids=lambda case: case.name)
def test_rms_norm_equals_the_reference(case: rms_norm_cases.Case) -> None:
    x, weight = rms_norm_cases.make_inputs(case, "cpu", 1)
    before = x.clone()
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), case.tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", rms_norm_cases.CASES, ids=lambda case: case.name)
def test_add_rms_norm_keeps_the_sum_as_the_residual(case: rms_norm_cases.Case) -> None:
    x, weight = rms_norm_cases.make_inputs(case, "cpu", 1)
    residual, _ = rms_norm_cases.make_inputs(case, "cpu", 2)
    total = x + residual
    got = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    close(got, rms_norm_reference(total, weight, 1e-6), case.tolerance)


@pytest.mark.parametrize("case", rope_cases.CASES, ids=lambda case: case.name)
def test_rope_equals_the_reference(case: rope_cases.Case) -> None:
    x, cos, sin = rope_cases.make_inputs(case, "cpu", 1)
    before = x.clone()
    got = rope(x, cos, sin, interleaved=case.interleaved)
    close(got, rope_reference(x, cos, sin, interleaved=case.interleaved), case.tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", gate_cases.CASES, ids=lambda case: case.name)
def test_silu_mul_equals_the_reference(case: gate_cases.Case) -> None:
    gate_up = gate_cases.make_inputs(case, "cpu", 1)
    before = gate_up.clone()
    close(silu_mul(gate_up), silu_mul_reference(gate_up), case.tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("case", gate_cases.CASES, ids=lambda case: case.name)
def test_gelu_mul_equals_the_reference(case: gate_cases.Case) -> None:
    gate_up = gate_cases.make_inputs(case, "cpu", 1)
    before = gate_up.clone()
    close(gelu_mul(gate_up), gelu_mul_reference(gate_up), case.tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("case", linear_cases.CASES, ids=lambda case: case.name)
def test_linear_equals_the_reference(case: linear_cases.Case) -> None:
    x, weight, bias = linear_cases.make_inputs(case, "cpu", 1)
    close(linear(x, pack(weight, bias)), linear_reference(x, weight, bias), case.tolerance)


def test_linear_without_onednn_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupellm.kernels.linear.onednn_supports", lambda device, dtype: False)
    x, weight, bias = linear_cases.make_inputs(linear_cases.CASES[1], "cpu", 1)
    packed = PackedLinear(weight, bias)
    assert packed.weight is weight
    assert torch.equal(linear(x, packed), linear_reference(x, weight, bias))


@pytest.mark.parametrize("case", kv_write_cases.CASES, ids=lambda case: case.name)
def test_kv_write_touches_the_named_slots_only(case: kv_write_cases.Case) -> None:
    key, value, key_cache, value_cache, slots = kv_write_cases.make_inputs(case, "cpu", 1)
    expected = [key_cache.clone(), value_cache.clone()]
    for token, slot in enumerate(slots.tolist()):
        expected[0][slot // case.block_size, :, slot % case.block_size] = key[token]
        expected[1][slot // case.block_size, :, slot % case.block_size] = value[token]
    kv_write(key, value, key_cache, value_cache, kv_rows(slots, case.kv_heads, case.block_size))
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])
