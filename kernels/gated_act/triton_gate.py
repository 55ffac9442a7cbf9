"""Gates on a GPU: silu or gelu of one half times the other, also put into eight bits."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_language import cast, tanh
from troupellm.kernels.common.triton_rows import largest, quantized, row_scale

GATE = Launch(warps=4, stages=1, constants={"BLOCK": 1024})
GATE_QUANTIZED = Launch(warps=8, stages=1, constants={"BLOCK": 2048})
Activation = Literal["silu", "gelu"]


@triton.jit
def gated(gate_up, there, size, GELU: tl.constexpr):
    """Pointers to gates; float32, rounded to the type of the inputs."""
    gate = tl.load(gate_up, there, 0.0).to(tl.float32)
    up = tl.load(gate_up + size, there, 0.0).to(tl.float32)
    if GELU:
        bent = tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        return cast(gate * 0.5 * (1.0 + bent) * up, gate_up.dtype.element_ty)
    else:
        return cast(gate / (1.0 + tl.exp(-gate)) * up, gate_up.dtype.element_ty)


@triton.jit
def gate_kernel(gate_up, out, size, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK results of one row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < size
    tl.store(out + row * size + columns, gated(gate_up + row * row_stride + columns, there, size, GELU), there)


@triton.jit
def gate_quantized_kernel(gate_up, out, scales, size, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One row; computed once for its largest magnitude, and again, from the cache, for its values."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    magnitude = tl.zeros([1], tl.float32)
    for begin in range(0, size, BLOCK):
        there = begin + lanes < size
        here = largest(gated(gate_up + row * row_stride + begin + lanes, there, size, GELU).to(tl.float32))
        magnitude = tl.where((here > magnitude) | (here != here), here, magnitude)
    scale = row_scale(magnitude, out.dtype.element_ty)
    tl.store(scales + row + tl.arange(0, 1), scale)
    for begin in range(0, size, BLOCK):
        there = begin + lanes < size
        wide = gated(gate_up + row * row_stride + begin + lanes, there, size, GELU).to(tl.float32)
        tl.store(out + row * size + begin + lanes, quantized(wide, scale, out.dtype.element_ty), there)


def gate_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    """As `silu_mul` or `gelu_mul`."""
    flat, size = _rows(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (flat.shape[0], triton.cdiv(size, GATE.constants["BLOCK"]))
        gate_kernel[grid](flat, out, size, flat.stride(0), GELU=activation == "gelu", **GATE.options)
    return out


def gate_quantized_triton(gate_up: Tensor, activation: Activation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `silu_mul_quantized` or `gelu_mul_quantized`."""
    flat, size = _rows(gate_up)
    out = torch.empty(flat.shape[0], size, dtype=dtype, device=flat.device)
    scales = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
    if flat.shape[0]:
        gate_quantized_kernel[(flat.shape[0],)](
            flat, out, scales, size, flat.stride(0), GELU=activation == "gelu", **GATE_QUANTIZED.options
        )
    return out, scales


def _rows(gate_up: Tensor) -> tuple[Tensor, int]:
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous(), gate_up.shape[-1] // 2
