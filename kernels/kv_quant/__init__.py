"""Number types of a KV cache, and the form of its rows in each.

A row is the part of the cache that belongs to one KV head and one token. In a cache of the model's own type it is the
numbers themselves. In int8 each row has its own scale, max|x| / 127 in float32, whose four bytes follow the values, so
that every copy of a block includes its scales. In float8_e4m3fn numbers are rounded to the nearest value, at most 448.

Where a processor has tiles (AMX), the compiled attention of a prompt over a cache in eight bits rounds queries and
softmax weights to bfloat16. That is an error of 2^-9 in each, where the cache's own are 2^-8 (int8, beside the largest
number of a row) and 2^-4 (fp8). Single tokens, and all with --batch-invariant, are computed in float32.
"""

import torch
from torch import Tensor

from troupellm.kernels.act_quant.reference import quantize_rows

SCALE_BYTES = 4
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """A cache's type by its name in the configuration.

    Args:
        dtype: the model's own, which "auto" stands for.
    """
    return {"int8": torch.int8, "fp8": FP8, "fp8_e4m3": FP8}.get(name, dtype)


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache of that type."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., head_dim] as a cache of `dtype` keeps them, [..., row_width]."""
    if dtype == torch.int8:
        flat = x.reshape(-1, x.shape[-1])
        values, scale = quantize_rows(flat)
        return torch.cat((values, scale[:, None].view(torch.int8)), dim=1).view(*x.shape[:-1], -1)
    return x.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8) if dtype == FP8 else x.to(dtype)


def decode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., row_width] of a cache as numbers of `dtype`, [..., head_dim]; computed in float32, rounded once."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    size = rows.shape[-1] - SCALE_BYTES
    scale = rows[..., size:].contiguous().view(torch.float32)
    return (rows[..., :size] * scale).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """The same memory in a type that every operator supports."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache
