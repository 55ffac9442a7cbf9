"""Weights that are put into the blocks of GGUF files: the file format's own reader finds them near the numbers."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.gguf_search import (
    GROUP,
    QUANTIZED,
    Fit,
    block_layout,
    quantize_blocks,
    search,
    search_reference,
)

ERROR = {"Q4_1": 0.075, "Q4_K": 0.08, "Q5_1": 0.037, "Q5_K": 0.042, "Q6_K": 0.022, "Q8_0": 0.007}
"""Of normal numbers, by their size."""


def numbers(rows: int, columns: int) -> Tensor:
    """Normal numbers; rows of other sizes, of zeros, of one number, and without negative ones are among them."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    weight[1], weight[2], weight[3] = 0.0, 1.5, weight[3].abs()
    return weight


@pytest.mark.parametrize("layout", QUANTIZED)
def test_the_format_s_own_reader_finds_the_numbers(layout: str) -> None:
    weight = numbers(24, 512)
    blocks = quantize_blocks(weight, layout)
    read = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[layout])
    assert np.array_equal(read, blocks.dequantize().numpy())
    error = (blocks.dequantize() - weight).norm() / weight.norm()
    assert error < ERROR[layout]
    assert not blocks.dequantize()[1].any()


@pytest.mark.parametrize("layout", ["Q4_1", "Q5_1"])
def test_the_search_is_better_than_the_whole_range(layout: str) -> None:
    weight = numbers(24, 512)
    plain = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[layout])
    ours = quantize_blocks(weight, layout).dequantize()
    theirs = torch.from_numpy(gguf.quants.dequantize(plain, gguf.GGMLQuantizationType[layout]))
    assert (ours - weight).norm() < 0.97 * (theirs - weight).norm()


def test_compiled_code_finds_the_reference_s_fits() -> None:
    groups = numbers(64, 512).view(-1, GROUP)
    found, expected = search(groups, 15), search_reference(groups, 15)
    near = torch.isclose(found.scale, expected.scale, rtol=1e-3) & torch.isclose(found.low, expected.low, rtol=1e-3)
    assert near.float().mean() > 0.98  # equal errors of two candidates may be decided by the last bit
    assert weighted_error(groups, found) <= weighted_error(groups, expected) * 1.0001


def weighted_error(groups: Tensor, fit: Fit) -> float:
    safe = torch.where(fit.scale == 0, torch.inf, fit.scale)
    codes = ((groups - fit.low) / safe).round().clamp(0, 15)
    weights = groups.square().mean(1, keepdim=True).sqrt() + groups.abs()
    return float((weights * (codes * fit.scale + fit.low - groups).square()).sum())


@pytest.mark.parametrize(
    ("columns", "layouts"),
    [(512, ["Q4_K", "Q5_K", "Q6_K"]), (96, ["Q4_1", "Q5_1", "Q8_0"]), (80, [None, None, None])],
)
def test_inputs_choose_the_layout(columns: int, layouts: list[str | None]) -> None:
    assert [block_layout(bits, columns) for bits in (4, 5, 6)] == layouts


@pytest.mark.parametrize("number", [1e6, float("nan"), float("inf")])
def test_numbers_beyond_float16_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="at most 65504"):
        quantize_blocks(torch.full((1, 32), number), "Q4_1")
