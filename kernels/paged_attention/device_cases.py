"""Cases of the kernels for a GPU, beside those that all paths share: `cases.CASES`."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.kv_quant import encode
from troupellm.kernels.paged_attention.cases import Case, make_inputs
from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan

DEVICE_CASES = (
    Case("edges_of_pages", (0, 14, 15, 16, 30, 31, 32), (1,) * 7, 4, 1, 16),
    Case("skewed", (250, 0, 3, 0, 17), (1,) * 5, 4, 2, 16),
    Case("page_of_32", (31, 32, 70), (1,) * 3, 2, 2, 16, block_size=32),
    Case("page_of_64", (63, 64, 130), (1,) * 3, 4, 1, 16, block_size=64),
    Case("group_of_7", (40, 3), (1, 1), 7, 1, 16),
    Case("group_of_24", (40, 3), (1, 1), 24, 1, 16),
    Case("head_dim_80", (20, 33), (1, 1), 2, 1, 80),
    Case("head_dim_96", (20, 0), (1, 18), 2, 1, 96),
    Case("head_dim_256", (20, 33), (1, 1), 2, 1, 256),
    Case("head_dim_512", (20, 0), (1, 17), 4, 2, 512),
    Case("verify", (20, 33, 0), (4, 4, 4), 8, 2, 16),
    Case("verify_over_a_page", (14, 30, 12), (5, 5, 5), 4, 2, 16),
    Case("verify_in_a_window", (40, 3, 17), (3, 3, 3), 4, 2, 16, window=5),
    Case("decode_in_a_window", (100, 3, 17, 0), (1,) * 4, 4, 2, 16, window=20),
    Case("decode_with_all", (100, 3, 17, 0), (1,) * 4, 4, 2, 16, window=20, softcap=1.5, sinks=True),
    Case("extend_in_a_window", (64, 0), (20, 70), 2, 1, 16, window=33),
    Case("extend_group_of_3", (5, 0), (37, 9), 6, 2, 16),
    Case("bfloat16_decode", (70, 3, 31), (1,) * 3, 8, 2, 32, dtype=torch.bfloat16, tolerance=2e-2),
)
SMALL_DECODE = Launch(warps=4, stages=3, constants={"TILE": 16})
SMALL_EXTEND = Launch(warps=4, stages=2, constants={"ROWS": 32, "TILE": 16})
"""Tiles as small as tensor cores take, so that small cases have several of them."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one case, on a device."""

    query: Tensor
    keys: Tensor
    values: Tensor
    plan: DevicePlan
    sinks: Tensor | None


def shape_of(case: Case, kv_dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(case.heads, case.kv_heads, case.head_dim, case.block_size, case.window, kv_dtype)


def make_device_inputs(
    case: Case,
    device: torch.device,
    seed: int,
    *,
    small: bool = True,
    programs: int | None = None,
    quantized: torch.dtype | None = None,
    invariant: bool = False,
) -> Inputs:
    """The inputs of a case for the kernels.

    Args:
        small: smallest tiles instead of those of the tables.
        programs: of the decode kernel.
        invariant: plan for `--batch-invariant`.
        quantized: store keys and values as this type of `kernels.kv_quant`.
    """
    query, keys, values, plan = make_inputs(case, "cpu", seed)
    tables = plan.block_tables.numpy().copy()
    if case.window is not None:
        give_back(case, tables, keys, values)
    generator = torch.Generator().manual_seed(seed + 1)
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    if quantized is not None:
        keys, values = poisoned_cache(keys, quantized), poisoned_cache(values, quantized)
    device_plan = DevicePlan.from_host(
        tables,
        np.asarray(case.starts),
        np.asarray(case.counts),
        device=device,
        shape=shape_of(case, keys.dtype),
        decode=SMALL_DECODE if small else None,
        extend=SMALL_EXTEND if small else None,
        programs=programs,
        invariant=invariant,
    )
    return Inputs(
        query.to(device), keys.to(device), values.to(device), device_plan, None if sinks is None else sinks.to(device)
    )


def poisoned_cache(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache in a type of `kernels.kv_quant`; where a row is NaN, its scale is, or its values are."""
    codes = encode(cache.nan_to_num(77.0), dtype)
    if dtype != torch.int8:
        return torch.where(cache.isnan(), cache, codes.float()).to(dtype)
    codes.view(torch.float32)[..., -1].masked_fill_(cache.isnan().any(dim=-1), float("nan"))
    return codes


def give_back(case: Case, tables: NDArray[np.int32], keys: Tensor, values: Tensor) -> None:
    """Blocks that are wholly outside of a row's window become -1 in its table, and their content becomes NaN."""
    assert case.window is not None
    for row, start in enumerate(case.starts):
        for column in range(max(0, start + 1 - case.window) // case.block_size):
            for cache in (keys, values):
                cache[tables[row, column]] = float("nan")
            tables[row, column] = -1
