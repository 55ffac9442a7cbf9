"""Shapes, types and tolerances that the tests and the benchmark of paged_attention share."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.paged_attention.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    tolerance: float = 2e-5
    softcap: float = 0.0
    sinks: bool = False


CASES = (
    Case("one_decode", (0,), (1,), 2, 1, 16),
    Case("decodes", (0, 5, 15, 16, 90), (1,) * 5, 6, 2, 32),
    Case("wide_group", (40, 3), (1, 1), 12, 1, 64),
    Case("odd_head_dim", (20, 3), (1, 20), 4, 2, 24),
    Case("odd_blocks", (20, 3, 9), (1, 1, 17), 4, 4, 16, block_size=5),
    Case("large_blocks", (70, 3), (1, 1), 4, 2, 16, block_size=48),
    Case("prefill", (0, 0), (33, 16), 4, 2, 32),
    Case("chunk_with_past", (37, 10), (25, 3), 4, 2, 32),
    Case("mixed", (0, 50, 7, 31, 0), (40, 1, 20, 5, 1), 6, 2, 16),
    Case("long_chunks", (5, 130, 0), (150, 70, 1), 4, 2, 48),
    Case("heads_of_80", (3, 0), (1, 75), 4, 4, 80),
    Case("long_window", (0, 90), (130, 20), 4, 2, 16, window=70),
    Case("group_of_seven", (0, 40), (70, 20), 14, 2, 16),
    Case("group_of_seven_window", (0, 90), (70, 20), 14, 2, 16, window=33),
    Case("window", (0, 50, 30, 2), (40, 1, 20, 4), 4, 2, 16, window=12),
    Case("window_of_one", (9,), (1,), 2, 2, 16, window=1),
    Case("soft_cap", (0, 50, 7), (40, 1, 3), 6, 2, 32, softcap=1.5),
    Case("sinks", (0, 50, 7, 20), (40, 1, 3, 17), 6, 2, 32, sinks=True),
    Case("sinks_window_cap", (0, 50, 7), (33, 1, 20), 4, 1, 64, window=9, softcap=0.8, sinks=True),
    Case("sinks_bfloat16", (0, 50), (20, 1), 4, 2, 32, dtype=torch.bfloat16, tolerance=3e-2, sinks=True),
    Case("bfloat16", (0, 50, 7), (40, 1, 20), 4, 2, 32, dtype=torch.bfloat16, tolerance=3e-2),
    Case("float16", (0, 50, 7), (40, 1, 2), 4, 2, 32, dtype=torch.float16, tolerance=4e-3),
)
WIDE_CASES = (
    Case("wide_decodes", (0, 5, 15, 16, 130), (1,) * 5, 20, 1, 272),
    Case("wide_alone", (90,), (1,), 20, 1, 272),
    Case("wide_mixed", (0, 50, 7, 31), (40, 1, 20, 5), 6, 2, 288, tolerance=4e-5),
    Case("wide_with_all", (0, 90, 7), (33, 1, 20), 19, 1, 272, window=70, softcap=0.8, sinks=True),
)
"""Heads wider than those whose keys and values the compiled code writes on the way."""


def make_inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    """`query`, `key_cache`, `value_cache` and the plan. All that no token may see is NaN."""
    generator = torch.Generator().manual_seed(seed)
    starts, counts = np.asarray(case.starts), np.asarray(case.counts)
    lengths = starts + counts
    needed = -(-lengths // case.block_size)
    order = torch.randperm(int(needed.sum()) + 3, generator=generator).to(torch.int32).numpy()
    tables = np.full((len(lengths), int(needed.max())), -1, dtype=np.int32)
    shape = (order.size, case.kv_heads, case.block_size, case.head_dim)
    caches = torch.full((2, *shape), float("nan"))
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
        for position in range(lengths[row]):
            block, place = tables[row, position // case.block_size], position % case.block_size
            caches[:, block, :, place] = torch.randn(2, case.kv_heads, case.head_dim, generator=generator)
    tokens = int(counts.sum())
    query = torch.randn(tokens, case.heads + case.kv_heads, case.head_dim, generator=generator)
    caches = caches.to(device, case.dtype)
    plan = AttentionPlan(
        tables, starts, counts, block_size=case.block_size, num_kv_heads=case.kv_heads, window=case.window
    )
    return query.to(device, case.dtype)[:, : case.heads], caches[0], caches[1], plan


def make_sinks(case: Case, device: str, seed: int) -> Tensor | None:
    """The sinks of a case that has some: float32 [heads]."""
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(case.heads, generator=generator, dtype=torch.float32) * 2
    return sinks.to(device) if case.sinks else None


def all_items(case: Case) -> Tensor:
    """Every query token of a case as an item of the reference: int32 [tokens, 4]."""
    items: list[tuple[int, int, int, int]] = []
    for row, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for end in range(start + 1, start + count + 1):
            items.append((len(items), row, 0 if case.window is None else max(0, end - case.window), end))
    return torch.tensor(items, dtype=torch.int32)
