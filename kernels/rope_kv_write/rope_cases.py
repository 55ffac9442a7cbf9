"""Shapes, types and tolerances that the tests and the benchmark of rope share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    tolerance: float
    rotary_dim: int | None = None
    """None is all of a head."""
    interleaved: bool = False


CASES = (
    Case("one_token", 1, 2, 16, torch.float32, 1e-6),
    Case("odd_heads", 5, 3, 24, torch.float32, 1e-6),
    Case("batch", 64, 16, 64, torch.float32, 1e-6),
    Case("bfloat16", 5, 4, 32, torch.bfloat16, 4e-2),
    Case("partial", 5, 3, 32, torch.float32, 1e-6, rotary_dim=12),
    Case("neighbours", 7, 3, 24, torch.float32, 1e-6, interleaved=True),
    Case("partial_neighbours", 7, 4, 64, torch.float32, 1e-6, rotary_dim=32, interleaved=True),
    Case("float16", 5, 4, 32, torch.float16, 4e-3),
)


def make_inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x`, `cos`, `sin`; `x` is a slice of a wider tensor, as the heads of a merged projection are."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(case.tokens, case.heads + 2, case.head_dim, generator=generator)
    angles = torch.rand(case.tokens, 1, (case.rotary_dim or case.head_dim) // 2, generator=generator) * 6.28
    x, cos, sin = (part.to(device, case.dtype) for part in (wide, angles.cos(), angles.sin()))
    return x[:, : case.heads], cos, sin
