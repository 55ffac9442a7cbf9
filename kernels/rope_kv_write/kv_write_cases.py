"""Shapes and types that the tests and the benchmark of kv_write share; the result is exact."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


CASES = (
    Case("one_token", 1, 1, 16, 16, torch.float32),
    Case("odd_sizes", 7, 3, 24, 5, torch.float32),
    Case("batch", 64, 4, 64, 16, torch.float32),
    Case("bfloat16", 9, 2, 32, 16, torch.bfloat16),
)


def make_inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`key`, `value`, `key_cache`, `value_cache` and `slots` in random blocks."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = case.tokens + 2
    new = torch.randn(2, case.tokens, case.kv_heads, case.head_dim, generator=generator)
    caches = torch.randn(2, num_blocks, case.kv_heads, case.block_size, case.head_dim, generator=generator)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[: case.tokens]
    new, caches = new.to(device, case.dtype), caches.to(device, case.dtype)
    return new[0], new[1], caches[0], caches[1], slots.to(device)
