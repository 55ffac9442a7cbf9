"""Shapes, types and tolerances that the tests and the benchmark of rope_kv_write share."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.kv_quant import row_width
from troupellm.kernels.rope_kv_write import HeadNorms
from troupellm.kernels.rope_kv_write.kv_write import kv_rows


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tolerance: float
    padding: int = 0
    """Rows behind the tokens."""
    rotary_dim: int | None = None
    """None is all of a head, 0 no rotation."""
    interleaved: bool = False
    norms: Literal["none", "head", "all"] = "none"
    cache: torch.dtype | None = None
    block_size: int = 16


FP32, INT8, FP8 = torch.float32, torch.int8, torch.float8_e4m3fn
CASES = (
    Case("one_token", 1, 4, 2, 16, FP32, 1e-5),
    Case("odd_sizes", 3, 9, 3, 24, FP32, 1e-5, padding=2, block_size=5),
    Case("head_norms", 3, 4, 2, 32, FP32, 1e-5, norms="head"),
    Case("norms_of_all", 3, 4, 2, 32, FP32, 1e-5, norms="all"),
    Case("partial", 2, 3, 1, 32, FP32, 1e-5, rotary_dim=12, norms="head"),
    Case("neighbours", 2, 3, 3, 24, FP32, 1e-5, interleaved=True),
    Case("partial_neighbours", 2, 4, 2, 32, FP32, 1e-5, rotary_dim=16, interleaved=True),
    Case("no_rotation", 2, 4, 2, 32, FP32, 1e-5, rotary_dim=0, norms="head"),
    Case("int8", 3, 4, 2, 32, FP32, 1e-5, norms="head", cache=INT8),
    Case("fp8", 3, 4, 2, 32, FP32, 1e-5, norms="head", cache=FP8),
    Case("bfloat16", 3, 4, 2, 32, torch.bfloat16, 4e-2, norms="head"),
    Case("bfloat16_int8", 3, 4, 2, 32, torch.bfloat16, 4e-2, cache=INT8),
    Case("bfloat16_fp8", 3, 4, 2, 32, torch.bfloat16, 4e-2, cache=FP8),
    Case("float16", 3, 4, 2, 64, torch.float16, 4e-3, rotary_dim=32),
)


class Inputs(NamedTuple):
    qkv: Tensor
    caches: tuple[Tensor, Tensor]
    rows: Tensor
    norms: HeadNorms | None
    angles: tuple[Tensor, Tensor] | None


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Tokens in random places of the cache, which holds bytes of noise."""
    generator = torch.Generator().manual_seed(seed)
    rows, size, dtype = case.tokens + case.padding, case.head_dim, case.dtype
    qkv = torch.randn(rows, case.heads + 2 * case.kv_heads, size, generator=generator) * 2
    blocks, kept = case.tokens + 2, case.cache or dtype
    bytes_of_row = row_width(size, kept) * kept.itemsize
    shape = (blocks, case.kv_heads, case.block_size, bytes_of_row)
    noise = [torch.randint(0, 64, shape, generator=generator, dtype=torch.uint8).to(device) for _ in range(2)]
    slots = torch.randperm(blocks * case.block_size, generator=generator)[: case.tokens]
    widths = {"head": (size, size), "all": (case.heads * size, case.kv_heads * size), "none": (0, 0)}[case.norms]
    weights = [(torch.rand(width, generator=generator) + 0.5).to(device, dtype) for width in widths]
    half = (size if case.rotary_dim is None else case.rotary_dim) // 2
    turns = torch.rand(rows, 1, half, generator=generator) * 6.28
    return Inputs(
        qkv=qkv.to(device, dtype),
        caches=(noise[0].view(kept), noise[1].view(kept)),
        rows=kv_rows(slots, case.kv_heads, case.block_size).to(device),
        norms=None if case.norms == "none" else HeadNorms(weights[0], weights[1], 1e-6),
        angles=(turns.cos().to(device, dtype), turns.sin().to(device, dtype)) if half else None,
    )
