"""Products with blocks of GGUF files: the definition, for any number of rows and threads, and rows of the weight."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.act_quant.reference import rounded_groups
from troupellm.kernels.linear import gated_linear, linear, linear_add, norm_linear, pack
from troupellm.kernels.quantized_linear import GgufBlocks, GgufMixture, Int4Group, held_bytes, merge
from troupellm.kernels.quantized_linear.cpu_blocks import PACKED, BlockProduct, load
from troupellm.kernels.quantized_linear.gguf import LARGEST, LAYOUTS, PACKED_BYTES, InputBits
from troupellm.tests.support.gguf.gguf_blocks import dequantized, hostile_blocks, random_blocks
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 70)
ALL = pytest.mark.parametrize("layout", PACKED_BYTES)
BITS = pytest.mark.parametrize("bits", LARGEST)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_compiled_code()


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def blocks(layout: str, rows: int, columns: int = 512, seed: int = 0, bits: InputBits = 15) -> GgufBlocks:
    return GgufBlocks(torch.from_numpy(random_blocks((rows, columns), layout, seed=seed)), layout, input_bits=bits)


def product_of(packed: object) -> BlockProduct:
    fast = getattr(packed, "fast", None)
    assert isinstance(fast, BlockProduct)
    return fast


def defined(x: Tensor, weight: GgufBlocks | GgufMixture, bits: InputBits) -> Tensor:
    """The product of rounded inputs, in float64."""
    return (rounded_groups(x, LARGEST[bits]).double() @ weight.dequantize().double().t()).float()


def test_rounded_groups_of_no_rows_are_no_rows() -> None:
    assert rounded_groups(torch.empty(0, 192), LARGEST[15]).shape == (0, 192)


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-6 * float(wanted.abs().max()), rtol=0.0)


def test_every_type_with_products_is_known_to_the_memory_plan() -> None:
    assert PACKED.keys() & LAYOUTS.keys() == PACKED_BYTES.keys()


@BITS
@ALL
def test_a_product_is_that_of_rounded_inputs(layout: str, bits: InputBits) -> None:
    weight, bias = blocks(layout, 72, bits=bits), torch.randn(72)
    packed = pack(weight, bias)
    assert product_of(packed).native.part is not None
    for rows in ROWS:
        x = torch.randn(rows, 512)
        near(linear(x, packed), defined(x, weight, bits) + bias)


@ALL
def test_fifteen_bits_of_inputs_are_as_good_as_floats(layout: str) -> None:
    weight, x = blocks(layout, 64), torch.randn(40, 512)
    wanted = x @ weight.dequantize().t()
    torch.testing.assert_close(linear(x, pack(weight)), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0.0)


@ALL
def test_a_weight_takes_the_memory_of_its_blocks(layout: str) -> None:
    weight = blocks(layout, 64)
    held = product_of(pack(weight)).nbytes
    assert held == weight.outlines[0].row_bytes * 64
    assert weight.nbytes <= held <= 1.03 * weight.nbytes


@pytest.mark.usefixtures("_threads")
@BITS
@ALL
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(layout: str, bits: InputBits) -> None:
    packed, norm, x = pack(blocks(layout, 96, 256, bits=bits)), torch.rand(256), torch.randn(150, 256)
    together = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together[threads] = norm_linear(x, norm, 1e-5, packed), gated_linear(x, packed, "silu", norm, 1e-5)
        assert all(map(torch.equal, together[threads], together[1]))
    for rows in (slice(0, 1), slice(3, 12), slice(20, 60), slice(149, 150)):
        assert torch.equal(norm_linear(x[rows], norm, 1e-5, packed), together[1][0][rows])
        assert torch.equal(gated_linear(x[rows], packed, "silu", norm, 1e-5), together[1][1][rows])


@BITS
def test_parts_of_several_types_are_one_product(bits: InputBits) -> None:
    sizes = {"Q4_K": 64, "Q5_0": 32, "Q6_K": 40}
    weight = merge([blocks(layout, rows, bits=bits) for layout, rows in sizes.items()])
    bias, norm = torch.randn(136), torch.rand(512)
    assert isinstance(weight, GgufMixture)
    packed = pack(weight, bias)
    product_of(packed)
    for rows in (1, 5, 20):
        x = torch.randn(rows, 512)
        wanted = defined(x, weight, bits) + bias
        near(linear(x, packed), wanted)
        total = torch.ones(rows, 136)
        linear_add(x, packed, total, 0.5)
        near(total, 1 + 0.5 * wanted)
    gates = pack(merge([blocks("Q4_K", 64, bits=bits), blocks("Q6_K", 64, seed=1, bits=bits)]))
    x = torch.randn(9, 512)
    gate, up = norm_linear(x, norm, 1e-5, gates).chunk(2, dim=-1)
    near(gated_linear(x, gates, "silu", norm, 1e-5), functional.silu(gate) * up)


def test_parts_that_end_within_a_unit_lie_side_by_side() -> None:
    weight, x = merge([blocks("Q4_K", 40), blocks("Q6_K", 40, seed=1)]), torch.randn(5, 512)
    packed = pack(weight)
    assert packed.native is None
    assert isinstance(weight, GgufMixture)
    near(linear(x, packed), defined(x, weight, 15))


@ALL
def test_rows_are_those_of_the_weight_to_the_bit(layout: str) -> None:
    usual, hostile = random_blocks((40, 512), layout), hostile_blocks(layout, 512)
    data = np.concatenate((usual.reshape(-1, hostile.shape[1]), hostile))
    wanted = dequantized(data, layout).reshape(-1, 512)
    found = product_of(pack(GgufBlocks(torch.from_numpy(data).view(len(wanted), -1), layout)))
    index = torch.randperm(len(wanted))
    assert np.array_equal(found.rows(index).numpy().view(np.uint32), wanted[index.numpy()].view(np.uint32))


def test_inputs_that_are_no_numbers_give_none_in_their_rows_alone() -> None:
    packed, x = pack(blocks("Q4_0", 32)), torch.randn(6, 512)
    clean = linear(x, packed)
    x[1, 40], x[4, 5] = torch.nan, torch.inf
    found = linear(x, packed)
    assert found[1].isnan().all()
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_the_smallest_inputs_are_kept_or_zero() -> None:
    packed = pack(blocks("Q8_0", 32))
    assert torch.equal(linear(torch.zeros(3, 512), packed), torch.zeros(3, 32))
    x = torch.full((1, 512), 1e-42)
    assert linear(x, packed).isfinite().all()


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256, 384])
def test_four_bits_with_a_scale_for_some_inputs_are_computed_alike(size: int) -> None:
    weight, bias = Int4Group.quantize(torch.randn(72, 2 * size), size), torch.randn(72)
    packed = pack(weight, bias)
    assert packed.kind == "int4"
    assert product_of(packed).nbytes <= held_bytes(weight.outlines[0], torch.device("cpu"), torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, 2 * size)
        wanted = (rounded_groups(x, LARGEST[15]).double() @ weight.dequantize().double().t()).float() + bias
        torch.testing.assert_close(linear(x, packed), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0.0)


def test_four_bits_without_zero_points_begin_in_their_middle() -> None:
    weight = Int4Group.from_values(torch.randint(0, 16, (48, 128)), torch.rand(48, 4))
    packed, x = pack(weight), torch.randn(9, 128)
    product_of(packed)
    wanted = x @ weight.dequantize().t()
    torch.testing.assert_close(linear(x, packed), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0.0)


def test_compiled_functions_agree_with_their_references() -> None:
    assert load() is not None
