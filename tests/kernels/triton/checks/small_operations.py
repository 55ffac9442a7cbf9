"""Norms, gates, rows in eight bits and what lies before attention, against the references, over memory of NaN."""

from collections.abc import Callable, Iterable

import pytest
import torch

from troupellm.kernels.act_quant import cases as code_cases
from troupellm.kernels.act_quant.reference import quantize_activation_reference
from troupellm.kernels.act_quant.triton_act_quant import quantize_activation_triton
from troupellm.kernels.common.triton import check_device
from troupellm.kernels.common.triton_probe import launch_error
from troupellm.kernels.gated_act import cases as gate_cases
from troupellm.kernels.gated_act.reference import gelu_mul_reference, silu_mul_reference
from troupellm.kernels.gated_act.triton_gate import gate_quantized_triton, gate_triton
from troupellm.kernels.rms_norm import cases as norm_cases
from troupellm.kernels.rms_norm.reference import rms_norm_reference
from troupellm.kernels.rms_norm.triton_norm import rms_norm_triton
from troupellm.kernels.rope_kv_write import (
    cases as rope_cases,
    kv_write_cases as write_cases,
    rope_cases as rotation_cases,
    triton_rope,
)
from troupellm.kernels.rope_kv_write.kv_write import kv_rows
from troupellm.kernels.rope_kv_write.kv_write_reference import kv_write_reference
from troupellm.kernels.rope_kv_write.reference import rope_kv_write_reference
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference
from troupellm.kernels.rope_kv_write.triton_rope import kv_write_triton, rope_kv_write_triton, rope_triton

DEVICE = str(check_device())
INT8, FP8 = torch.int8, torch.float8_e4m3fn
EIGHT_BITS = pytest.mark.parametrize("codes", [INT8, FP8])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels do not write is NaN."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", empty)


def named(cases: Iterable) -> list:
    """Cases as parameters."""
    return [pytest.param(case, id=case.name) for case in cases]


def between_nan(x: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN before, between and behind them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 9), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 4:-5] = x
    return wide[..., 4:-5]


def same_codes(got: tuple, expected: tuple) -> None:
    """Equal, but that a sum in another order may move a number to the code beside it."""
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=0)
    assert got[0].dtype == expected[0].dtype
    raw = [codes.view(torch.uint8).int() if codes.dtype == FP8 else codes.int() for codes in (got[0], expected[0])]
    moved = (raw[0] - raw[1]).abs()
    assert int(moved.max()) <= 1
    assert float(moved.float().mean()) < 0.02


@pytest.mark.parametrize("case", named(norm_cases.CASES))
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_the_reference(case: norm_cases.Case, offset: float) -> None:
    x, weight = norm_cases.make_inputs(case, DEVICE, 1)
    got, _ = rms_norm_triton(between_nan(x), between_nan(weight), 1e-5, offset=offset)
    assert got.dtype == case.dtype
    expected = rms_norm_reference(x, weight, 1e-5, offset)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)


def test_a_weight_in_float32_is_rounded_with_the_product_alone() -> None:
    case = next(case for case in norm_cases.CASES if case.name == "bfloat16")
    x, weight = norm_cases.make_inputs(case, DEVICE, 1)
    wide = weight.float() + 1
    got, _ = rms_norm_triton(between_nan(x), between_nan(wide), 1e-5)
    expected = rms_norm_reference(x, wide, 1e-5)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert float((got != expected).float().mean()) < 0.02  # sums in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_residual_takes_the_sum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(5, 72, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight, wanted = torch.rand(72, generator=generator).to(DEVICE, dtype), residual + x
    got, _ = rms_norm_triton(between_nan(x), weight, 1e-6, residual=residual)
    assert torch.equal(residual, wanted)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(got, rms_norm_reference(wanted, weight, 1e-6), atol=tolerance, rtol=tolerance)


@EIGHT_BITS
def test_a_norm_in_eight_bits(codes: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(3, 100, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.rand(100, generator=generator).to(DEVICE)
    expected = quantize_activation_reference(rms_norm_reference(residual + x, weight, 1e-6), codes)
    same_codes(rms_norm_triton(between_nan(x), weight, 1e-6, residual=residual, codes=codes), expected)


@pytest.mark.parametrize("case", named(code_cases.CASES))
def test_row_codes_equal_the_reference(case: code_cases.Case) -> None:
    x = code_cases.make_inputs(case, DEVICE, 4)
    values, scale = quantize_activation_triton(between_nan(x), case.codes)
    expected, expected_scale = quantize_activation_reference(x, case.codes)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


def test_a_row_of_nan_is_known_by_its_scale() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[1, 7] = float("nan")
    assert quantize_activation_triton(x, INT8)[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("case", named([case for case in gate_cases.CASES if case.tokens < 64]))
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_equal_the_reference(case: gate_cases.Case, activation: str) -> None:
    gate_up = gate_cases.make_inputs(case, DEVICE, 5)
    reference = silu_mul_reference if activation == "silu" else gelu_mul_reference
    got = gate_triton(between_nan(gate_up), activation)
    assert got.dtype == case.dtype
    torch.testing.assert_close(got, reference(gate_up), atol=case.tolerance, rtol=case.tolerance)


@EIGHT_BITS
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_in_eight_bits(activation: str, codes: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 130, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    reference = silu_mul_reference if activation == "silu" else gelu_mul_reference
    same_codes(
        gate_quantized_triton(between_nan(gate_up), activation, codes),
        quantize_activation_reference(reference(gate_up), codes),
    )


def test_rotation_without_writing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache row indices are whole numbers even where nothing is written: compiled code adds them to pointers."""
    given: list[tuple] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: given.append(arguments)

    monkeypatch.setattr(triton_rope, "rope_kv_write_kernel", Recorder())
    x, angles = torch.zeros(2, 3, 8, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, 1, 4, device=DEVICE)
    rope_triton(x, (angles, angles), interleaved=False)
    assert given[0][7].dtype == torch.int64


@pytest.mark.parametrize("case", named(rope_cases.CASES))
def test_rotation_and_writing_equal_the_reference(case: rope_cases.Case) -> None:
    qkv, caches, rows, norms, angles = rope_cases.make_inputs(case, DEVICE, 7)
    expected_caches = (caches[0].clone(), caches[1].clone())
    options = {"norms": norms, "angles": angles, "interleaved": case.interleaved}
    expected = rope_kv_write_reference(qkv, case.heads, expected_caches, rows, **options)
    got = rope_kv_write_triton(between_nan(qkv), case.heads, caches, rows, **options)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)
    for cache, wanted in zip(caches, expected_caches, strict=True):
        check_cache(case, cache, wanted, rows)


def test_head_norms_in_float32_are_rounded_with_the_product_alone() -> None:
    case = next(case for case in rope_cases.CASES if case.name == "bfloat16")
    qkv, caches, rows, norms, _ = rope_cases.make_inputs(case, DEVICE, 7)
    assert norms is not None
    options = {"norms": norms._replace(query=norms.query.float() + 1, key=norms.key.float() + 1)}
    expected = rope_kv_write_reference(qkv, case.heads, (caches[0].clone(), caches[1].clone()), rows, **options)
    got = rope_kv_write_triton(between_nan(qkv), case.heads, caches, rows, **options)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert float((got != expected).float().mean()) < 0.02


def check_cache(case: rope_cases.Case, cache: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows that were written hold the same; all others hold what they did, to the bit."""
    cache, wanted = (part.view(-1, part.shape[-1]) for part in (cache, wanted))
    untouched = torch.ones(cache.shape[0], dtype=torch.bool, device=DEVICE)
    untouched[rows] = False
    assert torch.equal(cache.view(torch.uint8)[untouched], wanted.view(torch.uint8)[untouched])
    got, expected = (part.view(torch.uint8)[rows].view(part.dtype) for part in (cache, wanted))
    if case.cache is None:
        torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)
        return
    size = case.head_dim
    moved = (got[:, :size].view(torch.uint8).int() - expected[:, :size].view(torch.uint8).int()).abs()
    moved = moved.minimum(256 - moved)
    exact = case.dtype == torch.float32
    assert float((moved > 1).float().mean()) <= (0 if exact else 0.05)
    assert float((moved > 0).float().mean()) <= (0.02 if exact else 0.3)
    if case.cache == INT8:
        scales = [part[:, size:].contiguous().view(torch.float32) for part in (got, expected)]
        torch.testing.assert_close(*scales, rtol=1e-5 if exact else 1e-2, atol=0)


@pytest.mark.parametrize("case", named(rotation_cases.CASES[1:2] + rotation_cases.CASES[3:]))
def test_rotation_alone_equals_the_reference(case: rotation_cases.Case) -> None:
    x, cos, sin = rotation_cases.make_inputs(case, DEVICE, 8)
    got = rope_triton(x, (cos, sin), interleaved=case.interleaved)
    expected = rope_reference(x, cos, sin, interleaved=case.interleaved)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("case", named([case for case in write_cases.CASES if case.tokens < 64]))
def test_writing_alone_equals_the_reference(case: write_cases.Case) -> None:
    key, value, *caches, slots = write_cases.make_inputs(case, DEVICE, 9)
    rows = kv_rows(slots, case.kv_heads, case.block_size)
    expected = [cache.clone() for cache in caches]
    kv_write_reference(key, value, *expected, rows)
    kv_write_triton(between_nan(key), between_nan(value), *caches, rows)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


def test_the_probe_launches_a_kernel() -> None:
    assert launch_error(check_device()) == ""
    assert "does not launch kernels on meta" in launch_error(torch.device("meta"))
