"""Rows in eight bits on a GPU: one walk for the largest magnitude, one, of the cache, for the values."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_rows import largest, quantized, row_scale

LAUNCH = Launch(warps=8, stages=1, constants={"BLOCK": 2048})


@triton.jit
def quantize_activation_kernel(x, out, scales, size, row_stride, BLOCK: tl.constexpr):
    """One row."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    magnitude = tl.zeros([1], tl.float32)
    for begin in range(0, size, BLOCK):
        wide = tl.load(x + row * row_stride + begin + lanes, begin + lanes < size, 0.0).to(tl.float32)
        here = largest(wide)
        magnitude = tl.where((here > magnitude) | (here != here), here, magnitude)
    scale = row_scale(magnitude, out.dtype.element_ty)
    tl.store(scales + row + tl.arange(0, 1), scale)
    for begin in range(0, size, BLOCK):
        there = begin + lanes < size
        wide = tl.load(x + row * row_stride + begin + lanes, there, 0.0).to(tl.float32)
        tl.store(out + row * size + begin + lanes, quantized(wide, scale, out.dtype.element_ty), there)


def quantize_activation_triton(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `quantize_activation`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        quantize_activation_kernel[(x.shape[0],)](x, values, scale, x.shape[1], x.stride(0), **LAUNCH.options)
    return values, scale
