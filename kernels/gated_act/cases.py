"""Shapes, types and tolerances that the tests and the benchmarks of silu_mul and gelu_mul share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    size: int
    dtype: torch.dtype
    tolerance: float


CASES = (
    Case("one_token", 1, 17, torch.float32, 1e-5),
    Case("batch", 64, 2048, torch.float32, 1e-5),
    Case("bfloat16", 5, 96, torch.bfloat16, 6e-2),
    Case("float16", 5, 96, torch.float16, 6e-3),
)


def make_inputs(case: Case, device: str, seed: int) -> Tensor:
    """[tokens, 2 * size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(case.tokens, 2 * case.size, generator=generator).to(device, case.dtype)
