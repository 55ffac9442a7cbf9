"""Eight-bit products on a CPU: every path gives the definition's numbers, to the bit."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.act_quant.reference import quantize_groups
from troupellm.kernels.linear import PackedLinear, best_rows, gated_linear, linear, linear_add, norm_linear, pack
from troupellm.kernels.quantized_linear import Int8Channel, cpu_int8
from troupellm.kernels.quantized_linear.int8 import INPUT_GROUP, fused

PANELS = (64, 48, 32, 16)
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


@pytest.fixture(params=["all", "torch alone", "AVX2 alone"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("torch alone", "AVX2 alone"):
        monkeypatch.setattr(cpu_int8, "compiled", lambda: None)
        monkeypatch.setattr(cpu_int8, "row_quantizer", lambda: None)
    if request.param == "AVX2 alone":
        monkeypatch.setattr(torch, "_int_mm", saturating)
        monkeypatch.setattr(cpu_int8, "int_mm_is_exact", cpu_int8.int_mm_is_exact.__wrapped__)
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


def test_torch_computes_large_results_in_parts(path: str) -> None:
    weight, bias, x = make(2**15, 40), torch.randn(2**15), inputs(70, 40)
    assert x.shape[0] * weight.shape[0] > 2 * cpu_int8.AT_ONCE
    assert torch.equal(linear(x, pack(weight, bias)), weight.product(x, bias)), path


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
    packed = pack(make(1024, 1024)).fast
    assert isinstance(packed, cpu_int8.Int8Product)
    assert (packed._values is None) == (packed._compiled is not None)


@pytest.mark.parametrize("panel", PANELS)
def test_the_values_can_be_read_from_panels(panel: int) -> None:
    values = make(49, 101).values
    assert torch.equal(cpu_int8.from_panels(cpu_int8.in_panels(values, panel), 49, 101), values)


def test_torch_multiplies_many_rows_where_compiled_code_takes_few(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_int8.compiled() is None:
        pytest.skip("no compiled code")
    few = cpu_int8.limits()._replace(many_rows=0)
    monkeypatch.setattr(cpu_int8, "limits", lambda: few)
    weight, bias, x = make(80, 300), torch.randn(80), inputs(cpu_int8.FEW_ROWS + 1, 300)
    packed = pack(weight, bias)
    assert not packed.takes(x.shape[0])
    assert torch.equal(linear(x, packed), weight.product(x, bias))


def test_an_outlier_costs_its_own_group_of_inputs_alone() -> None:
    """An input of 1,000 makes others of its group 0 that are near 1; with one scale for the row, all of them."""
    weight, x = make(32, 3 * INPUT_GROUP), inputs(7, 3 * INPUT_GROUP)
    x[:, :INPUT_GROUP] = 0.0
    x[:, 5] = 1000.0
    small = functional.linear(x[:, INPUT_GROUP:], weight.dequantize()[:, INPUT_GROUP:])
    large = 1000.0 * weight.dequantize()[:, 5]
    found = linear(x, pack(weight)) - large
    by_row = weight.grouped_product(x, None, x.shape[1]) - large
    assert float((found - small).norm()) < 0.02 * float(small.norm())
    assert float((by_row - small).norm()) > 0.5 * float(small.norm())


RAGGED_ROWS = (1, 2, 6, 7, 15, 16, 17, 31, 33, 47, 64, 65, 200, 1030)


def in_panels_of(weight: Int8Channel, bias: torch.Tensor | None, panel: int) -> PackedLinear:
    """A weight whose compiled product reads panels of so many outputs and takes any number of rows."""
    functions = cpu_int8.compiled()
    if cpp.load() is None:
        pytest.skip("no compiled code")
    assert functions is not None, "it differs from its reference"
    packed, panels = pack(weight, bias), cpu_int8.in_panels(weight.values, panel)
    packed.native = cpu_int8.Int8FewRows(functions, panels, panel, weight, bias)
    packed.native.most_rows = max(RAGGED_ROWS)
    return packed


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(("outs", "depth"), [(33, 100), (200, 64), (560, 300)])
def test_any_number_of_rows_in_all_layouts(outs: int, depth: int, panel: int) -> None:
    weight, bias = make(outs, depth), torch.randn(outs)
    plain, biased = in_panels_of(weight, None, panel), in_panels_of(weight, bias, panel)
    for rows in RAGGED_ROWS:
        x, residual = inputs(rows, depth + 5)[:, 2:-3], torch.randn(rows, outs)
        assert torch.equal(linear(x, plain), weight.product(x)), f"{rows} rows"
        assert torch.equal(linear(x, biased), weight.product(x, bias)), f"{rows} rows"
        total = residual.clone()
        linear_add(x, biased, total, 0.5)
        torch.testing.assert_close(total, residual + 0.5 * weight.product(x, bias))


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("outs", [96, 224])
def test_a_row_is_the_same_alone_and_among_any_number(outs: int, panel: int) -> None:
    """With all that comes before a product and behind it, and with any number of threads."""
    weight, norm = make(outs, 100), torch.rand(100)
    packed = in_panels_of(weight, torch.randn(outs), panel)
    x, residual = inputs(max(RAGGED_ROWS), 103)[:, :100], torch.randn(max(RAGGED_ROWS), outs)

    def results(begin: int, end: int) -> list[torch.Tensor]:
        total, some = residual[begin:end].clone(), x[begin:end]
        linear_add(some, packed, total, 0.3)
        gates = [gated_linear(some, packed, kind, norm, 1e-5) for kind in ("silu", "gelu_tanh")]
        return [total, norm_linear(some, norm, 1e-5, packed), *gates]

    alone = [torch.cat(found) for found in zip(*(results(row, row + 1) for row in range(x.shape[0])), strict=True)]
    before = torch.get_num_threads()
    try:
        for rows, threads in product(RAGGED_ROWS, (1, 2, 3)):
            torch.set_num_threads(threads)
            begin = (x.shape[0] - rows) // 2
            for found, expected in zip(results(begin, begin + rows), alone, strict=True):
                assert torch.equal(found, expected[begin : begin + rows]), f"{rows} rows, {threads} threads"
    finally:
        torch.set_num_threads(before)


def test_gates_of_many_rows_are_those_of_the_definition() -> None:
    weight, bias = make(224, 100), torch.randn(224)
    for rows in RAGGED_ROWS:
        x = inputs(rows, 100)
        gate, up = weight.product(x, bias).chunk(2, dim=-1)
        expected = functional.silu(gate) * up
        tolerance = 1e-5 * float(expected.abs().max())
        got = gated_linear(x, in_panels_of(weight, bias, 64), "silu")
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e-3, 1.0, 1e20, 1e38])
def test_inputs_of_all_sizes_are_rounded_as_by_a_division(size: float) -> None:
    """Halves and what is next to them most of all."""
    halves = torch.arange(-254, 255, dtype=torch.float32) / 254
    x = torch.stack([halves, halves.nextafter(torch.tensor(2.0)), halves.nextafter(torch.tensor(-2.0))]) * size
    values, scale = cpu_int8.quantized_inputs(x)
    expected, expected_scale = quantize_groups(x, INPUT_GROUP)
    assert torch.equal(values, expected)
    assert torch.equal(scale, expected_scale)


def test_rows_beyond_what_memory_is_kept_for() -> None:
    weight, x = make(48, 64), inputs(4200, 64)
    packed = in_panels_of(weight, None, 64)
    assert packed.native is not None
    packed.native.most_rows = 5000
    assert torch.equal(linear(x, packed), weight.product(x))


def test_with_tiles_all_rows_are_taken() -> None:
    weight = make(48, 100)
    compiled = pack(weight).native
    if compiled is not None:
        assert compiled.most_rows == (cpu_int8.limits().many_rows or cpu_int8.FEW_ROWS)


def test_the_reference_rounds_a_product_and_its_addition_once() -> None:
    """Beside exact fractions: sums that lie next to the middle between two numbers of float32 most of all."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-(2**23), 2**23, (4000,), generator=generator).float()
    b = torch.randn(4000, generator=generator) * 1e-3
    c = (torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-20, 24, (4000,), generator=generator)).float()
    a[:2000], b[:2000] = 2.0**-24, 1.0 + 2.0 ** -torch.randint(1, 24, (2000,), generator=generator).float()
    c[:2000] = 1.0 + torch.randint(0, 2**20, (2000,), generator=generator) * 2.0**-23
    found = fused(a, b, c)
    for one, x, y, z in zip(*(part.tolist() for part in (found, a, b, c)), strict=True):
        exact, got = Fraction(x) * Fraction(y) + Fraction(z), torch.tensor(one)
        beside = [float(got.nextafter(torch.tensor(side))) for side in (torch.inf, -torch.inf)]
        assert all(abs(Fraction(one) - exact) <= abs(Fraction(other) - exact) for other in beside)
