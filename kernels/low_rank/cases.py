"""Shapes, types and tolerances of the tests of low_rank."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.low_rank.weights import GroupedRows, LowRankWeights, grouped_rows


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    groups: tuple[int, ...]
    """Of each row; -1 is none."""
    ranks: tuple[int, ...]
    """Of each group; 0 adds nothing."""
    in_features: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    tolerance: float
    most: int = 16
    """Largest rank that there is room for."""
    biased: bool = False
    multiplied: bool = False
    """Groups have factors."""


CASES = (
    Case("one_row", (0,), (4,), 32, (16,), torch.float32, 1e-4),
    Case("no_rows", (-1, -1), (4,), 32, (16,), torch.float32, 1e-4),
    Case("odd_sizes", (2, 0, -1, 0, 2, 1, 0), (3, 0, 16), 70, (40, 7, 33), torch.float32, 1e-3),
    Case("biases", (1, 1, -1, 0), (5, 2), 48, (24, 8), torch.float32, 1e-3, biased=True),
    Case("factors", (1, 1, -1, 0), (5, 2), 48, (24, 8), torch.float32, 1e-3, biased=True, multiplied=True),
    Case("full_rank", (1, 0, 1, 1), (8, 8), 96, (64, 64), torch.float32, 1e-3, most=8),
    Case("bfloat16", (0, -1, 1, 1, 0), (4, 16), 96, (64, 32), torch.bfloat16, 6e-2),
)


class Inputs(NamedTuple):
    x: Tensor
    weights: LowRankWeights
    rows: GroupedRows
    out: Tensor


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Rows of no group hold NaN."""
    generator, place = torch.Generator().manual_seed(seed), torch.device(device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(place, case.dtype)

    weights = LowRankWeights(len(case.ranks), case.most, case.in_features, case.widths, case.dtype, place)
    for group, rank in enumerate(case.ranks):
        for part, width in enumerate(case.widths if rank else ()):
            bias = drawn(width) if case.biased else None
            factor = drawn(width) if case.multiplied else None
            weights.put(group, part, drawn(rank, case.in_features) / 8, drawn(width, rank), bias, factor)
    rows = grouped_rows(np.array(case.groups), len(case.ranks), lambda numbers: torch.from_numpy(numbers).to(place))
    x, out = drawn(len(case.groups), case.in_features), drawn(len(case.groups), sum(case.widths))
    x[np.array(case.groups) < 0] = float("nan")
    return Inputs(x, weights, rows, out)
