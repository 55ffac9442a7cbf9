"""The kinds of quantized weights: what they stand for, how they are joined and cut, and how close they come."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import gated_linear, linear, linear_add, norm_linear, pack
from troupellm.kernels.quantized_linear import (
    Fp8,
    GgufBlocks,
    GgufMixture,
    Int4Group,
    Int8Channel,
    Int8WeightOnly,
    merge,
)
from troupellm.kernels.quantized_linear.mx import element_values
from troupellm.tests.support.kernels.compiled_code import torch_alone
from troupellm.tests.support.quantized.quantized_weights import COLUMNS, ROWS, kinds, weight

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
NAMES = tuple(kinds())


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_kind_join_and_rows_are_cut_out(name: str) -> None:
    first, second = kinds(1, 64)[name], kinds(2, 32)[name]
    joined = merge([first, second])
    assert isinstance(joined, type(first))
    assert joined.shape == (96, COLUMNS)
    assert torch.equal(joined.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    index = torch.tensor([40, 3, 3, 0])
    assert torch.equal(joined.rows(index).dequantize(), joined.dequantize()[index])
    assert torch.equal(joined.rows(slice(30, 36)).dequantize(), joined.dequantize()[30:36])
    assert joined.nbytes == sum(tensor.nbytes for tensor in joined.tensors())
    assert joined.nbytes < 1.1 * joined.shape[0] * COLUMNS


@pytest.fixture(params=[pytest.param("compiled", marks=needs_compiler), "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch_alone() if request.param == "torch" else nullcontext():
        yield request.param


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_product_is_the_definition(name: str, path: str) -> None:
    kind, bias = kinds()[name], torch.randn(ROWS)
    packed = pack(kind, bias)
    assert (packed.fast is None) == (path == "torch" and not isinstance(kind, Int8Channel))
    assert packed.kind == (kind.kind if packed.fast is not None else f"{kind.kind}, dequantized at load")
    norm = torch.rand(COLUMNS)
    for rows in (0, 1, 3, 5, 16, 17, 70):
        x = torch.randn(rows, COLUMNS)
        expected = kind.product(x, bias)
        tolerance = 2e-4 * float(expected.abs().amax()) if rows else 0.0
        torch.testing.assert_close(linear(x, packed), expected, atol=tolerance, rtol=1e-4)
        total = torch.ones(rows, ROWS)
        linear_add(x, packed, total, 0.5)
        torch.testing.assert_close(total, 1 + 0.5 * expected, atol=tolerance, rtol=1e-4)
        if not isinstance(kind, Int8Channel):  # of which tests/kernels/quantized_linear/test_int8_product.py knows more
            normed = kind.product(functional.rms_norm(x, (COLUMNS,), norm, 1e-5), bias)
            torch.testing.assert_close(norm_linear(x, norm, 1e-5, packed), normed, atol=tolerance, rtol=1e-4)
            gated = functional.silu(normed[:, : ROWS // 2]) * normed[:, ROWS // 2 :]
            tolerance = 4e-4 * float(gated.abs().amax()) if rows else 0.0
            got = gated_linear(x, packed, "silu", norm, 1e-5)
            torch.testing.assert_close(got, gated, atol=tolerance, rtol=1e-3)


def test_blocks_of_different_layouts_join_and_stay_what_they_are(path: str) -> None:
    """As queries, keys and values of Q4_K_M."""
    parts = [kinds(1, 64)["q4_k"], kinds(2, 16)["q4_k"], kinds(3, 16)["q6_k"]]
    joined, bias = merge(parts), torch.randn(ROWS)
    assert isinstance(joined, GgufMixture)
    assert [part.layout for part in joined.parts] == ["Q4_K", "Q6_K"]
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    index = torch.tensor([81, 95, 3, 0, 80])
    assert torch.equal(joined.rows(index).dequantize(), joined.dequantize()[index])
    assert torch.equal(GgufMixture.cat([joined, joined]).dequantize(), joined.dequantize().repeat(2, 1))
    assert joined.nbytes == sum(part.nbytes for part in parts)
    packed = pack(joined, bias)
    assert packed.kind == ("gguf" if path == "compiled" else "gguf, dequantized at load")
    for rows in (0, 1, 5, 16, 17):
        x = torch.randn(rows, COLUMNS)
        expected = joined.product(x, bias)
        tolerance = 2e-4 * float(expected.abs().amax()) if rows else 0.0
        torch.testing.assert_close(linear(x, packed), expected, atol=tolerance, rtol=1e-4)
        total = torch.ones(rows, ROWS)
        linear_add(x, packed, total, 0.5)
        torch.testing.assert_close(total, 1 + 0.5 * expected, atol=tolerance, rtol=1e-4)


@needs_compiler
def test_rows_do_not_depend_on_their_number() -> None:
    for kind in kinds().values():
        packed, x = pack(kind), torch.randn(16, COLUMNS)
        together = linear(x, packed)
        assert all(torch.equal(linear(x[row : row + 1], packed)[0], together[row]) for row in range(16))


@needs_compiler
def test_many_rows_do_not_depend_on_their_number_where_that_is_asked_for() -> None:
    mixture = merge([kinds(1, 64)["q4_k"], kinds(2, 32)["q6_k"]])
    for kind in (*kinds().values(), mixture):
        with batch_invariant():
            packed = pack(kind)
        x = torch.randn(70, COLUMNS)
        together = linear(x, packed)
        for rows in (slice(0, 1), slice(3, 20), slice(20, 60), slice(69, 70)):
            assert torch.equal(linear(x[rows], packed), together[rows])


def test_groups_in_any_order_are_computed_with_as_they_are(path: str) -> None:
    values, group = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randperm(COLUMNS) % 4
    kind = Int4Group.from_values(values, torch.rand(ROWS, 4), zero=torch.randint(0, 16, (ROWS, 4)), group=group)
    packed, norm = pack(kind), torch.rand(COLUMNS)
    assert (packed.fast is None) == (path == "torch")
    for rows in (1, 5, 20):
        x = torch.randn(rows, COLUMNS)
        torch.testing.assert_close(linear(x, packed), kind.product(x), atol=1e-2, rtol=1e-4)
        normed = kind.product(functional.rms_norm(x, (COLUMNS,), norm, 1e-5))
        torch.testing.assert_close(norm_linear(x, norm, 1e-5, packed), normed, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8", 0.012), ("int8_weight_only", 0.009), ("int8_groups", 0.007), ("int4", 0.09), ("fp8", 0.03)],
)
def test_the_error_of_quantization_on_load(name: str, most: float) -> None:
    """Of a product of normal numbers, relative to its root mean square."""
    x = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(3))
    exact = x @ weight().t()
    error = (kinds()[name].product(x) - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert most / 2 < error < most


def test_different_kinds_join_dequantized() -> None:
    parts = [Int8WeightOnly.quantize(weight()), Fp8.quantize(weight(1)), weight(2)]
    joined = merge(parts)
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined[:ROWS], parts[0].dequantize())
    assert torch.equal(joined[2 * ROWS :], parts[2])


def test_different_groups_join_dequantized() -> None:
    parts = [Int4Group.quantize(weight(), 32), Int4Group.quantize(weight(1), 64)]
    assert torch.equal(merge(parts), torch.cat([part.dequantize() for part in parts]))


def test_groups_may_be_in_any_order() -> None:
    """As in GPTQ's `desc_act`: which group an input belongs to is said by an index."""
    values = torch.randint(0, 16, (ROWS, COLUMNS))
    scale, zero = torch.rand(ROWS, 4), torch.randint(0, 16, (ROWS, 4), dtype=torch.uint8)
    group = torch.arange(COLUMNS) % 4
    got = Int4Group.from_values(values, scale, zero=zero, group=group).dequantize()
    assert torch.equal(got, (values - zero.float()[:, group]) * scale[:, group])


def test_values_of_small_floats() -> None:
    """The tables of the OCP MX specification."""
    fp4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert element_values("fp4_e2m1").tolist() == fp4 + [-value for value in fp4]
    assert element_values("fp6_e2m3").max() == 7.5
    assert element_values("fp6_e3m2").max() == 28.0
    assert element_values("fp6_e2m3")[1] == 0.125
    assert element_values("fp6_e3m2")[1] == 0.0625


def test_a_zero_row_stays_zero() -> None:
    zero = torch.zeros(4, COLUMNS)
    for kind in (Int8Channel.quantize(zero), Int4Group.quantize(zero, 32), Fp8.quantize(zero)):
        assert torch.equal(kind.product(torch.ones(1, COLUMNS)), torch.zeros(1, 4))
    x = torch.zeros(2, COLUMNS)
    assert torch.equal(Int8Channel.quantize(weight()).product(x), torch.zeros(2, ROWS))


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(4, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="3 groups do not divide 64 inputs"):
        Int8WeightOnly(codes, torch.ones(4, 3))
    with pytest.raises(ValueError, match="groups without a scale"):
        Int8WeightOnly(codes, torch.ones(4, 2), group=torch.full((64,), 2))
    with pytest.raises(ValueError, match="multiples of 34 bytes"):
        GgufBlocks(torch.zeros(4, 35, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ValueError, match="one scale per row"):
        Int8Channel(codes, torch.ones(3))
