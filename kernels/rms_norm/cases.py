"""Shapes, types and tolerances that the tests and the benchmark of rms_norm share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tolerance: float


CASES = (
    Case("one_row", (1, 64), torch.float32, 1e-5),
    Case("odd_size", (7, 65), torch.float32, 1e-5),
    Case("per_head", (5, 4, 32), torch.float32, 1e-5),
    Case("batch", (64, 768), torch.float32, 1e-5),
    Case("bfloat16", (5, 128), torch.bfloat16, 2e-2),
    Case("float16", (5, 128), torch.float16, 2e-3),
)


def make_inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """`x` [*shape] and `weight` [shape[-1]]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.shape, generator=generator) * 3
    weight = torch.rand(case.shape[-1], generator=generator) + 0.5
    return x.to(device, case.dtype), weight.to(device, case.dtype)
