"""Shapes, types and tolerances that the tests and the benchmark of linear share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    tolerance: float


CASES = (
    Case("one_row", 1, 64, 96, False, torch.float32, 1e-4),
    Case("odd_sizes", 5, 33, 17, True, torch.float32, 1e-4),
    Case("batch", 32, 768, 1280, False, torch.float32, 1e-3),
    Case("bfloat16", 5, 64, 48, True, torch.bfloat16, 0.3),
    Case("float16", 5, 64, 48, False, torch.float16, 3e-2),
)


def make_inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """`x`, `weight`, `bias`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.rows, case.in_features, generator=generator).to(device, case.dtype)
    weight = torch.randn(case.out_features, case.in_features, generator=generator).to(device, case.dtype)
    bias = torch.randn(case.out_features, generator=generator).to(device, case.dtype) if case.bias else None
    return x, weight, bias
