"""Shapes, types and tolerances that the tests and the benchmark of grouped_linear share."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: tuple[int, ...]
    """Rows of each group."""
    others: int
    """Rows of no group."""
    in_features: int
    out_features: int
    dtype: torch.dtype
    tolerance: float
    scaled: bool = False


CASES = (
    Case("one_row", (1,), 0, 32, 16, torch.float32, 1e-4),
    Case("odd_sizes", (3, 0, 1, 17), 2, 70, 40, torch.float32, 1e-3),
    Case("low_rank_down", (2, 5), 1, 200, 8, torch.float32, 1e-3),
    Case("low_rank_up", (2, 5), 1, 8, 200, torch.float32, 1e-3, scaled=True),
    Case("no_rows", (0, 0), 3, 32, 16, torch.float32, 1e-4),
    Case("bfloat16", (4, 20), 3, 96, 64, torch.bfloat16, 6e-2, scaled=True),
    Case("float16", (4, 2), 3, 96, 64, torch.float16, 1e-2, scaled=True),
)


class Inputs(NamedTuple):
    x: Tensor
    weights: Tensor
    rows: Tensor
    starts: Tensor
    out: Tensor
    scales: Tensor | None


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Rows of groups in a random order; those of none hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    total, groups = sum(case.counts) + case.others, len(case.counts)
    order = torch.randperm(total, generator=generator)
    x = torch.randn(total, case.in_features, generator=generator)
    x[order[sum(case.counts) :]] = float("nan")
    weights = torch.randn(groups, case.out_features, case.in_features, generator=generator)
    out = torch.randn(total, case.out_features, generator=generator)
    starts = torch.tensor([0, *case.counts]).cumsum(0)
    scales = torch.rand(groups, generator=generator) + 0.5 if case.scaled else None
    return Inputs(
        x.to(device, case.dtype),
        weights.to(device, case.dtype),
        order[: sum(case.counts)].int().to(device),
        starts.int().to(device),
        out.to(device, case.dtype),
        None if scales is None else scales.to(device),
    )
