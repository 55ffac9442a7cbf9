"""Every type of blocks: expanded as the format's own package does, and computed with in its codes."""

import shutil

import gguf
import numpy as np
import pytest
import torch

from troupellm.kernels.fused_moe.stacked import stack
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized_linear import GgufBlocks, GgufMixture, held_bytes, merge, stays
from troupellm.kernels.quantized_linear.gguf import LAYOUTS, SLAB_WEIGHTS, blocks_outline, mx_of
from troupellm.kernels.quantized_linear.packed_weights import packed_weight
from troupellm.tests.support.gguf.gguf_blocks import dequantized, hostile_blocks, random_blocks

CPU = torch.device("cpu")
HELD_BITS = {
    "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
    "Q2_K": 8, "Q3_K": 6, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 5, "IQ3_XXS": 5, "IQ3_S": 5, "IQ2_XXS": 5,
    "IQ2_XS": 6, "IQ2_S": 6, "IQ1_S": 5, "IQ1_M": 6, "TQ1_0": 4.5, "TQ2_0": 4.5,
}  # fmt: skip
"""Of one weight in memory: the bits of the file, or its code and its part of the float32 scale and offset of its
group."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
ALL = pytest.mark.parametrize("layout", LAYOUTS)


def blocks(layout: str, rows: int, columns: int = 512, seed: int = 0) -> GgufBlocks:
    return GgufBlocks(torch.from_numpy(random_blocks((rows, columns), layout, seed=seed)), layout)


def test_every_type_has_the_size_that_the_package_says() -> None:
    for name, layout in LAYOUTS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (layout.weights, layout.size)


@ALL
def test_weights_are_those_of_the_package_to_the_bit(layout: str) -> None:
    usual = random_blocks((64, 512), layout).reshape(-1, LAYOUTS[layout].size)
    data = np.concatenate((usual, hostile_blocks(layout, 512)))
    expected, got = dequantized(data, layout), GgufBlocks(torch.from_numpy(data), layout).dequantize().numpy()
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@ALL
def test_a_single_block_is_read_wherever_it_lies(layout: str) -> None:
    data = hostile_blocks(layout, 4)
    expected, weight = dequantized(data, layout), GgufBlocks(torch.from_numpy(data), layout)
    for index in range(4):
        got = weight.rows(slice(index, index + 1)).dequantize().numpy()
        assert np.array_equal(got.view(np.uint32), expected[index : index + 1].view(np.uint32))


@ALL
def test_codes_stand_for_the_same_weights_to_the_bit(layout: str) -> None:
    """The codes that products compute with, decoded as the compiled code decodes them."""
    data = hostile_blocks(layout, 256).reshape(64, -1)
    weight = GgufBlocks(torch.from_numpy(data), layout)
    codes = packed_weight(weight)
    assert codes is not None
    numbers = codes.codes.view(torch.int8).float()
    if codes.table is not None:
        halves = torch.stack((codes.codes & 15, codes.codes >> 4), dim=-1).flatten(1)
        numbers = codes.table.float()[halves.long()]
    decoded = numbers.view(*codes.scale.shape, -1) * codes.scale[..., None]
    decoded = decoded if codes.offset is None else decoded + codes.offset[..., None]
    assert torch.equal(decoded.flatten(1).view(torch.int32), weight.dequantize().view(torch.int32))


@needs_compiler
@ALL
def test_products_are_computed_in_codes(layout: str) -> None:
    """Not in weights that were expanded: the load log says so, and memory is planned so."""
    weight = blocks(layout, 128)
    (outline,) = weight.outlines
    assert stays(outline, CPU, torch.float32)
    assert held_bytes(outline, CPU, torch.float32) * 8 / (128 * 512) == pytest.approx(HELD_BITS[layout], abs=0.01)
    packed = pack(weight)
    assert packed.kind == "gguf"
    assert packed.native is not None
    for rows in (1, 5, 16, 40):
        x = torch.randn(rows, 512)
        expected = torch.nn.functional.linear(x, weight.dequantize())
        torch.testing.assert_close(linear(x, packed), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@needs_compiler
@ALL
def test_a_type_is_merged_with_every_other_one(layout: str) -> None:
    """Queries, keys and values of mixtures: one product, of which each part keeps its own codes."""
    first, x = blocks(layout, 32), torch.randn(3, 512)
    for other in LAYOUTS:
        second = blocks(other, 16, seed=1)
        joined = merge([first, second])
        assert isinstance(joined, GgufBlocks if other == layout else GgufMixture)
        expected = torch.cat((first.dequantize(), second.dequantize()))
        assert torch.equal(joined.dequantize(), expected)
        packed = pack(joined)
        assert packed.kind == "gguf"
        wanted = x @ expected.t()
        torch.testing.assert_close(linear(x, packed), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)


def test_weights_of_several_slabs_are_put_together() -> None:
    weight = blocks("Q4_K", SLAB_WEIGHTS // 512 + 5)
    expected = torch.cat([part for place, _ in weight.slabs() for part in [weight.rows(place).dequantize()]])
    assert sum(1 for _ in weight.slabs()) == 2
    assert torch.equal(weight.dequantize(), expected)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_a_table_that_counts_up_is_told_from_others() -> None:
    """A GPU's products decode four bits by adding a number, which they can do for some tables only."""
    found = {name: blocks_outline(name, 1, 256).code for name in LAYOUTS}
    assert {name for name, code in found.items() if code == "int4"} == {
        "Q4_0",
        "Q4_1",
        "Q4_K",
        "Q2_K",
        "Q3_K",
        "TQ1_0",
        "TQ2_0",
    }
    assert {name for name, code in found.items() if code == "table4"} == {name for name in LAYOUTS if name[:2] == "IQ"}
    assert found["MXFP4"] == "mxfp4"


def test_mxfp4_is_the_same_weight_in_the_layout_of_the_specification() -> None:
    data = random_blocks((6, 512), "MXFP4")
    data[0, ::17] = range(16)  # down to subnormal numbers
    weight = GgufBlocks(torch.from_numpy(data), "MXFP4")
    assert torch.equal(mx_of(weight).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="Q8_0 is not MXFP4"):
        mx_of(blocks("Q8_0", 2))


def test_experts_in_blocks_are_stacked_as_they_are() -> None:
    """As a GPU has them: all of one type in their codes, others dequantized."""
    for layout, kind in (("Q4_K", "int4"), ("Q5_0", "int8"), ("MXFP4", "mx"), ("IQ4_XS", "plain")):
        stacked = stack([blocks(layout, 16, seed=seed) for seed in range(3)])
        assert (stacked.kind, stacked.experts) == (kind, 3)
    mixed = stack([merge([blocks("Q4_K", 16), blocks("Q6_K", 16)])])
    assert mixed.kind == "plain"
