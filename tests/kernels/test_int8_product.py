"""Eight-bit products on a CPU: every path gives the definition's numbers, to the bit."""

import pytest
import torch
from torch.nn import functional

from troupellm.kernels.linear import best_rows, gated_linear, linear, linear_add, norm_linear, pack
from troupellm.kernels.quantized import Int8Channel, int8_cpu

SHAPES = ((17, 33), (48, 100), (80, 64), (864, 288), (16, 2100))


def make(outs: int, depth: int, dtype: torch.dtype = torch.float32) -> Int8Channel:
    generator = torch.Generator().manual_seed(outs)
    values = torch.randint(-128, 128, (outs, depth), generator=generator, dtype=torch.int8)
    return Int8Channel(values, torch.rand(outs, generator=generator) + 0.1, dtype=dtype)


def inputs(rows: int, depth: int) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows))


def saturating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As processors with AVX2 and without VNNI do it: pairs of products are cut off at 16 bits."""
    x, weight = functional.pad(x, (0, x.shape[1] % 2)), functional.pad(weight, (0, 0, 0, weight.shape[0] % 2))
    products = (x.int() + 128)[:, :, None] * weight.int()
    pairs = (products[:, ::2] + products[:, 1::2]).clamp(-32768, 32767)
    return pairs.sum(1, dtype=torch.int32) - 128 * weight.sum(0, dtype=torch.int32)


@pytest.fixture(params=["all", "without compiled code", "without oneDNN", "torch alone", "AVX2 alone"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("without compiled code", "torch alone", "AVX2 alone"):
        monkeypatch.setattr(int8_cpu, "compiled", lambda: None)
        monkeypatch.setattr(int8_cpu, "row_quantizer", lambda: None)
    if request.param in ("without oneDNN", "torch alone", "AVX2 alone"):
        monkeypatch.setattr(int8_cpu, "onednn_works", lambda: False)
    if request.param == "AVX2 alone":
        monkeypatch.setattr(torch, "_int_mm", saturating)
        monkeypatch.setattr(int8_cpu, "int_mm_is_exact", int8_cpu.int_mm_is_exact.__wrapped__)
    return str(request.param)


@pytest.mark.parametrize(("outs", "depth"), SHAPES)
def test_every_number_of_rows(outs: int, depth: int, path: str) -> None:
    weight, bias = make(outs, depth), torch.randn(outs)
    plain, biased = pack(weight), pack(weight, bias)
    for rows in (0, 1, 2, 5, 7, 12, 16, 17, 40):
        x = inputs(rows, depth)
        assert torch.equal(linear(x, plain), weight.product(x)), f"{rows} rows, {path}"
        assert torch.equal(linear(x, biased), weight.product(x, bias)), f"{rows} rows, {path}"
        assert best_rows(plain, rows) >= rows


@pytest.mark.parametrize("rows", [1, 5, 16, 20])
def test_a_norm_before_and_a_gate_or_a_sum_behind(rows: int, path: str) -> None:
    """A norm that differs in its last bit moves a few inputs to the next of their 255 values."""
    weight, bias = make(96, 100), torch.randn(96)
    packed, x, norm = pack(weight, bias), inputs(rows, 100), torch.rand(100)
    residual = torch.randn(rows, 96)
    normed = weight.product(functional.rms_norm(x, (100,), norm, 1e-5), bias)
    tolerance = 0.01 * float(normed.abs().max())
    torch.testing.assert_close(norm_linear(x, norm, 1e-5, packed), normed, atol=tolerance, rtol=0.0)
    gated = functional.silu(normed[:, :48]) * normed[:, 48:]
    tolerance = 0.02 * float(gated.abs().max())
    torch.testing.assert_close(gated_linear(x, packed, "silu", norm, 1e-5), gated, atol=tolerance, rtol=0.0)
    total = residual.clone()
    linear_add(x, packed, total, 0.5)
    torch.testing.assert_close(total, residual + 0.5 * weight.product(x, bias))


def test_rows_may_lie_apart_and_be_of_another_type(path: str) -> None:
    weight = make(48, 100)
    x = inputs(6, 300)[:, 100:200]
    assert torch.equal(linear(x, pack(weight)), weight.product(x))
    weight, half = make(48, 100, torch.bfloat16), x.bfloat16()
    got = linear(half, pack(weight))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, weight.product(half))


def test_a_row_that_is_not_a_number_spoils_itself_alone(path: str) -> None:
    weight, x = make(48, 100), inputs(12, 100)
    good = linear(x, pack(weight))
    x[3, 7] = float("nan")
    got = linear(x, pack(weight))
    assert got[3].isnan().all()
    got[3] = good[3]
    assert torch.equal(got, good)


def test_the_weight_is_in_memory_once() -> None:
    product = pack(make(1024, 1024)).fast
    assert isinstance(product, int8_cpu.Int8Product)
    if product._packed is not None:
        assert product._values.numel() == 0


def test_layouts_that_are_not_known_are_found_out() -> None:
    weight = make(48, 100)
    for panel in int8_cpu.PANELS:
        laid = int8_cpu.in_panels(weight.values, panel)
        assert int8_cpu.panel_of(laid.data_ptr(), laid.numel(), weight.values) == panel
    other = torch.zeros(64 * 128, dtype=torch.int8)
    assert int8_cpu.panel_of(other.data_ptr(), other.numel(), weight.values) == 0
