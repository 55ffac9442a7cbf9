"""The memory plan and the linear layers agree on which weights stay in their codes, and on their size."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.kernels.quantized_linear.test_quantized import kinds
from troupellm.kernels.common.triton import installed
from troupellm.kernels.fused_moe import SILU, PackedExperts
from troupellm.kernels.fused_moe.stacked import StackedExperts, stack
from troupellm.kernels.linear import pack
from troupellm.kernels.quantized_linear import Fp8, Int4Group, Mx, QuantizedWeight, held_bytes, stays
from troupellm.kernels.quantized_linear.gpu import EightBitProduct, PackedGpuProduct, gpu_product
from troupellm.models.worker.quantization_report import quantization_report
from troupellm.tests.support.kernels.compiled_code import torch_alone
from troupellm.tests.support.quantized.quantized_weights import table4

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = (*kinds(), "mxfp8", "fp8_e5m2", "odd", "ordered", "nf4")
HALF_KEPT = {"int8"}
"""By a CPU that computes in bfloat16."""
DEQUANTIZED_BY_GPU = {"mxfp4", "nvfp4", "nf4", "fp8_e5m2", "odd"}
UNSTACKED_BY_GPU = {"mxfp6", "mxfp8", "nvfp4", "nf4", "fp8_tiles", "ordered"}
NEVER_KEPT = ("fp8_e5m2", "odd", "nf4")
needs_triton = pytest.mark.skipif(not installed(), reason="no triton")


def made(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantizedWeight:
    plain = torch.randn(96, 256, generator=torch.Generator().manual_seed(seed))
    match name:
        case "mxfp8":
            codes, exponents = plain.to(torch.float8_e4m3fn).view(torch.uint8), torch.full((96, 8), 127)
            weight: QuantizedWeight = Mx(codes, exponents.to(torch.uint8), "fp8_e4m3")
        case "fp8_e5m2":
            weight = Fp8(plain.to(torch.float8_e5m2), torch.ones(96))
        case "odd":
            weight = Fp8.quantize(plain[:, :255])
            weight.eight_bit_inputs = False
        case "nf4":
            weight = table4(torch.linspace(-1, 1, 16) ** 3, 64, seed)
        case "ordered":
            grouped = Int4Group.quantize(plain, 32)
            group = torch.arange(256, dtype=torch.int32) % 8
            weight = Int4Group(grouped.codes, grouped.scale, zero=grouped.zero, group=group)
        case _:
            weight = kinds(seed)[name]
    weight.dtype = dtype
    return weight


def taken(*tensors: Tensor | None) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_weight_that_stays_quantized_on_a_cpu_gives_its_product(
    name: str, dtype: torch.dtype, compiled: bool
) -> None:
    if compiled and shutil.which("g++") is None:
        pytest.skip("no compiler")
    with nullcontext() if compiled else torch_alone():
        weight = made(name, dtype)
        (outline,) = weight.outlines
        kept = pack(weight).fast is not None
        assert stays(outline, CPU, dtype) == kept
        assert kept == (name in HALF_KEPT or (dtype == torch.float32 and compiled and name not in NEVER_KEPT))
        if not kept:
            assert held_bytes(outline, CPU, dtype) == weight.shape[0] * weight.shape[1] * dtype.itemsize


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_whatever_the_type_and_without_a_compiler(name: str) -> None:
    weight = made(name)
    (outline,) = weight.outlines
    with torch_alone():
        for dtype in (torch.float32, torch.bfloat16):
            assert stays(outline, GPU, dtype) == (name not in DEQUANTIZED_BY_GPU)
            full = weight.shape[0] * weight.shape[1] * dtype.itemsize
            assert stays(outline, GPU, dtype) or held_bytes(outline, GPU, dtype) == full
    if name in DEQUANTIZED_BY_GPU:
        return
    product = gpu_product(weight, None)
    if isinstance(product, EightBitProduct):
        held = taken(product.values, product.scale)
    else:
        assert isinstance(product, PackedGpuProduct)
        codes = product.weight
        held = taken(codes.codes, codes.scale, codes.offset, codes.order)
    assert held == held_bytes(outline, GPU, torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_experts_on_a_gpu(name: str) -> None:
    weights = [made(name, torch.bfloat16, seed) for seed in range(3)]
    (outline,) = weights[0].outlines
    stacked = stack(weights)
    kept = stacked.kind != "plain"
    assert kept == stays(outline, GPU, torch.bfloat16, experts=True) == (name not in UNSTACKED_BY_GPU)
    assert taken(stacked.values, stacked.scales) == 3 * held_bytes(outline, GPU, torch.bfloat16, experts=True)
    experts = PackedExperts((), (), SILU, StackedExperts(stacked, stacked, None, None, SILU))
    behind = "" if kept else ", dequantized at load"
    assert quantization_report(experts) == f"products: 3 {weights[0].kind} experts{behind}"


def test_experts_that_differ_are_dequantized_and_that_is_said() -> None:
    stacked = stack([made("int4"), made("int8")])
    assert stacked.kind == "plain"
    assert "dequantized at load" in quantization_report([stacked])
    assert quantization_report([stack([torch.ones(4, 4)] * 2)]) == ""


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6"])
def test_where_the_codes_are_there_they_are_dequantized(name: str) -> None:
    """Tables of what codes mean go along with them."""
    weight = made(name)
    there = Mx(weight.codes.to("meta"), weight.exponents.to("meta"), weight.element)
    assert there.dequantize().device.type == "meta"
    assert there.dequantize().shape == weight.shape


def test_inputs_are_put_into_eight_bits_only_where_both_sides_are_to_be() -> None:
    plain = torch.randn(32, 64)
    on_load = Fp8.quantize(plain)
    weight_only = Fp8(on_load.values, on_load.scale)
    assert isinstance(gpu_product(on_load, None), EightBitProduct)
    assert isinstance(gpu_product(weight_only, None), PackedGpuProduct)
    assert isinstance(gpu_product(Fp8.cat([on_load, weight_only]), None), PackedGpuProduct)
    assert isinstance(gpu_product(Fp8.cat([on_load, on_load.rows(slice(0, 8))]), None), EightBitProduct)
