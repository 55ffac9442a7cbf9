"""Products with quantized weights against their definitions, over memory that holds NaN where no kernel may read."""

import pytest
import torch

from troupellm.kernels.act_quant.reference import quantize_activation_reference
from troupellm.kernels.common.triton import check_device
from troupellm.kernels.quantized_linear import Fp8, GgufBlocks, Int4Group, Int8Channel, Int8WeightOnly, QuantizedWeight
from troupellm.kernels.quantized_linear.gguf import LAYOUTS
from troupellm.kernels.quantized_linear.gpu import EightBitProduct, PackedGpuProduct, gpu_product

DEVICE = check_device()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", empty)


def between_nan(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + 9), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 4:-5] = x
    return wide[:, 4:-5]


def inputs(rows: int, depth: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + depth)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(width, depth, generator=generator)
    return x.to(DEVICE), weight.to(DEVICE), torch.randn(width, generator=generator).to(DEVICE)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "depth", "width"), [(3, 300, 70), (1, 64, 16), (40, 130, 129), (130, 33, 17)])
def test_int8_inputs_and_weights(rows: int, depth: int, width: int, biased: bool) -> None:
    x, plain, bias = inputs(rows, depth, width)
    weight = Int8Channel.quantize(plain)
    product = gpu_product(weight, bias if biased else None)
    assert isinstance(product, EightBitProduct)
    expected = weight.grouped_product(x, bias if biased else None, depth)
    torch.testing.assert_close(product(between_nan(x)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_fp8_inputs_and_weights(whole: bool) -> None:
    x, plain, bias = inputs(5, 272, 40)
    weight = Fp8.quantize(plain)
    if whole:
        weight = Fp8(weight.values, torch.tensor([0.01], device=DEVICE), eight_bit_inputs=True)
    product = gpu_product(weight, bias)
    assert isinstance(product, EightBitProduct)
    codes, scale = quantize_activation_reference(x, torch.float8_e4m3fn)
    expected = (codes.float() * scale[:, None]) @ weight.dequantize().t() + bias
    got = product(between_nan(x))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    exact = weight.product(x, bias)
    assert float((got - exact).norm() / exact.norm()) < 0.05


def made(kind: str, plain: torch.Tensor) -> QuantizedWeight:
    depth = plain.shape[1]
    match kind:
        case "int4 groups of 32":
            return Int4Group.quantize(plain, 32)
        case "int4 groups of 128":
            return Int4Group.quantize(plain, 128)
        case "int4 without zeros":
            weight = Int4Group.quantize(plain, depth // 2)
            return Int4Group(weight.codes, weight.scale, dtype=plain.dtype)
        case "int4 in another order":
            weight = Int4Group.quantize(plain, 64)
            order = torch.randperm(depth, generator=torch.Generator().manual_seed(3))
            group = (torch.arange(depth) // 64)[order].to(torch.int32).to(DEVICE)
            return Int4Group(weight.codes, weight.scale, zero=weight.zero, group=group, dtype=plain.dtype)
        case "int8":
            return Int8WeightOnly.quantize(plain)
        case "int8 groups":
            return Int8WeightOnly.quantize(plain, 64)
        case "fp8 rows":
            weight = Fp8.quantize(plain)
            return Fp8(weight.values, weight.scale, dtype=plain.dtype)
        case _:
            scale = torch.rand(-(-plain.shape[0] // 32), depth // 64, device=DEVICE) + 0.5
            return Fp8(plain.to(torch.float8_e4m3fn), scale, block=(32, 64), dtype=plain.dtype)


KINDS = ("int4 groups of 128", "int4 groups of 32", "int4 without zeros", "int4 in another order", "int8",
         "int8 groups", "fp8 rows", "fp8 blocks")  # fmt: skip


@pytest.mark.parametrize("rows", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_weights_in_codes_equal_the_reference(kind: str, rows: int) -> None:
    x, plain, bias = inputs(rows, 1280 if "128" in kind else 640, 70)
    weight = made(kind, plain)
    product = gpu_product(weight, bias)
    assert isinstance(product, PackedGpuProduct)
    torch.testing.assert_close(product(between_nan(x)), weight.product(x, bias), atol=2e-3, rtol=1e-4)


SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q5_1": (0, 2), "Q6_K": (208,), "TQ2_0": (64,)}
"""Bytes at which the float16 numbers of a block begin: groups of 16, 32 and 256, in four and eight bits."""
QUICK = ("Q2_K", "Q5_1")
"""Of four and of eight bits."""


@pytest.mark.parametrize(
    "layout", [layout if layout in QUICK else pytest.param(layout, marks=pytest.mark.slow) for layout in SCALES]
)
def test_blocks_of_gguf_files(layout: str) -> None:
    generator, block = torch.Generator().manual_seed(1), LAYOUTS[layout]
    data = torch.randint(0, 256, (70 * 512 // block.weights, block.size), generator=generator, dtype=torch.uint8)
    for at in SCALES[layout]:
        data[:, at : at + 2] = torch.full((len(data), 1), 0.01).half().view(torch.uint8)
    weight, (x, _, bias) = GgufBlocks(data.view(70, -1).to(DEVICE), layout), inputs(3, 512, 70)
    product = gpu_product(weight, bias)
    assert isinstance(product, PackedGpuProduct)
    expected = weight.product(x, bias)
    torch.testing.assert_close(product(between_nan(x)), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_sixteen_bits(dtype: torch.dtype) -> None:
    x, plain, _ = inputs(3, 256, 40)
    for weight in (Int4Group.quantize(plain.to(dtype), 128), Int8Channel.quantize(plain.to(dtype))):
        product = gpu_product(weight, None)
        assert product is not None
        got, expected = product(x.to(dtype)), weight.product(x.to(dtype)).float()
        assert got.dtype == dtype
        assert float((got.float() - expected).norm() / expected.norm()) < 1e-2


def test_a_row_is_computed_alike_in_any_batch() -> None:
    """The first one: the interpreter multiplies by numpy, whose sums depend on a row's place with some processors."""
    x, plain, bias = inputs(33, 640, 40)
    for kind in (Int8WeightOnly, Fp8):
        product = gpu_product(kind.quantize(plain), bias, batch_invariant=True)
        assert product is not None
        assert torch.equal(product(x)[:1], product(x[:1]))
