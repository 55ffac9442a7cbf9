"""Eight-bit products on a CPU: every path gives the definition's numbers, to the bit."""

import pytest
import torch

from troupellm.kernels.linear import best_rows, linear, pack
from troupellm.kernels.quantized import Int8Channel, int8_cpu

SHAPES = ((17, 33), (48, 100), (80, 64), (864, 288))


def make(outs: int, depth: int) -> Int8Channel:
    generator = torch.Generator().manual_seed(outs)
    values = torch.randint(-128, 128, (outs, depth), generator=generator, dtype=torch.int8)
    return Int8Channel(values, torch.rand(outs, generator=generator) + 0.1)


def inputs(rows: int, depth: int) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(params=["all", "without compiled code", "without oneDNN", "torch alone"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("without compiled code", "torch alone"):
        monkeypatch.setattr(int8_cpu, "few_rows", lambda: None)
        monkeypatch.setattr(int8_cpu, "row_quantizer", lambda: None)
    if request.param in ("without oneDNN", "torch alone"):
        monkeypatch.setattr(int8_cpu, "onednn_works", lambda: False)
    return str(request.param)


@pytest.mark.parametrize(("outs", "depth"), SHAPES)
def test_every_number_of_rows(outs: int, depth: int, path: str) -> None:
    weight, bias = make(outs, depth), torch.randn(outs)
    plain, biased = pack(weight), pack(weight, bias)
    for rows in (1, 2, 5, 7, 12, 16, 17, 40):
        x = inputs(rows, depth)
        assert torch.equal(linear(x, plain), weight.product(x)), f"{rows} rows, {path}"
        assert torch.equal(linear(x, biased), weight.product(x, bias)), f"{rows} rows, {path}"
        assert best_rows(plain, rows) >= rows


def test_rows_may_lie_apart_and_be_of_another_type(path: str) -> None:
    weight = make(48, 100)
    x = inputs(6, 300)[:, 100:200]
    assert torch.equal(linear(x, pack(weight)), weight.product(x))
    half = x.bfloat16()
    got = linear(half, pack(weight))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, weight.product(half))


def test_a_row_that_is_not_a_number_spoils_itself_alone(path: str) -> None:
    weight, x = make(48, 100), inputs(20, 100)
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
