"""Shapes that the tests and the benchmark of mla_attention share."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.paged_attention.plan import AttentionPlan

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Largest difference from the reference; inputs are normal with deviation 1, and weights keep that."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    contexts: tuple[int, ...]
    """Per row, positions before the step's first token."""
    counts: tuple[int, ...]
    """Per row, tokens of the step."""
    heads: int = 4
    plain: int = 16
    rotated: int = 8
    value: int = 12
    latent: int = 32
    block_size: int = 8
    dtype: torch.dtype = torch.float32


CASES = (
    Case("decode", (0, 5, 63, 31), (1, 1, 1, 1)),
    Case("odd_sizes", (3, 17), (1, 2), heads=3, plain=10, rotated=6, value=7, latent=21, block_size=5),
    Case("prefill", (0,), (60,)),
    Case("short_prefill", (40, 0), (17, 18)),
    Case("mixed", (9, 0, 33, 12), (1, 70, 3, 20)),
    Case("long_rows", (9, 0, 33, 21), (1, 50, 3, 40)),
    Case("bfloat16", (9, 0), (1, 48), dtype=torch.bfloat16),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    query: Tensor
    cache: Tensor
    plan: AttentionPlan
    items: Tensor
    """Every token's own, for the reference."""
    key_weight: Tensor
    value_weight: Tensor
    scale: float


def make_inputs(case: Case, device: str, seed: int, *, by_token: bool = False) -> Inputs:
    """Random blocks in random order; places that no token may read hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    starts, counts = np.array(case.contexts, dtype=np.int64), np.array(case.counts, dtype=np.int64)
    ends, size, width = starts + counts, case.block_size, case.latent + case.rotated
    num_blocks = int((-(-ends // size)).sum()) + 2
    order = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    tables, taken = np.zeros((len(ends), int(-(-ends.max() // size))), dtype=np.int32), 0
    cache = torch.full((num_blocks, 1, size, width), float("nan"))
    items, token = [], 0
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        blocks = -(-end // size)
        tables[row, :blocks] = order[taken : taken + blocks]
        taken += blocks
        for position in range(end):
            cache[tables[row, position // size], 0, position % size] = torch.randn(width, generator=generator)
            if position >= start:
                items.append((token, row, 0, position + 1))
                token += 1
    plan = AttentionPlan(tables, starts, counts, block_size=size, num_kv_heads=1, by_token=by_token)
    shapes = ((token, case.heads, case.plain + case.rotated), (case.heads, case.plain, case.latent))
    query, key_weight = (torch.randn(shape, generator=generator) for shape in shapes)
    value_weight = torch.randn(case.heads, case.value, case.latent, generator=generator)
    root = case.latent**0.5
    query, cache, key_weight, value_weight = (
        x.to(device, case.dtype) for x in (query, cache, key_weight / root, value_weight / root)
    )
    own = torch.tensor(items, dtype=torch.int32, device=device)
    return Inputs(query, cache, plan, own, key_weight, value_weight, (case.plain + case.rotated) ** -0.5)
