"""Residual, norm and eight-bit result in one launch on a GPU; a row is read once."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.common.triton_language import cast
from troupellm.kernels.common.triton_rows import largest, quantized, row_scale

LARGEST_SIZE = 32768
"""Largest row that one program holds in its registers."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 512
"""Short rows share a program, up to this many numbers together."""


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    rows,
    size,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    offset,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows.

    Args:
        x: row r begins at r // inner * outer_stride + r % inner * inner_stride.
        residual: None, or the tensor that x is added to, in place.
        out: [rows, size], contiguous; the type of `x`, or an eight-bit one with `scales` float32 [rows].
        OFFSET: the weight is weight + offset, and nothing is rounded before it; so it is with a wider weight, too.
    """
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (columns < size)[None, :]
    begins = row // inner * outer_stride + row % inner * inner_stride
    wide = tl.load(x + begins[:, None] + columns[None, :], there, 0.0).to(tl.float32)
    if residual is not None:
        places = residual + row[:, None] * residual_stride + columns[None, :]
        total = cast(wide + tl.load(places, there, 0.0).to(tl.float32), x.dtype.element_ty)
        tl.store(places, total, there)
        wide = total.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
    factors = tl.load(weight + columns, columns < size, 0.0).to(tl.float32)[None, :]
    if OFFSET:
        normed = cast(scaled * (factors + offset), x.dtype.element_ty)
    else:
        normed = cast(cast(scaled, x.dtype.element_ty).to(tl.float32) * factors, x.dtype.element_ty)
    if scales is None:
        tl.store(out + row[:, None] * size + columns[None, :], normed, there)
    else:
        wide = normed.to(tl.float32)
        scale = row_scale(largest(wide), out.dtype.element_ty)
        tl.store(scales + row, scale, row < rows)
        tl.store(out + row[:, None] * size + columns[None, :], quantized(wide, scale, out.dtype.element_ty), there)


def norm_launch(size: int) -> Launch:
    """The launch for rows of this size: some 16 to 32 numbers in each thread."""
    block = next_power_of_2(max(size, 16))
    rows = max(TILE // block, 1)
    return Launch(min(max(block * rows // 512, 1), 16), 1, {"ROWS": rows, "BLOCK": block})


def takes(x: Tensor) -> bool:
    """True if the kernel computes rows of this type and size."""
    return x.dtype in TYPES and x.shape[-1] <= LARGEST_SIZE


def rms_norm_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    codes: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The norm of x, or of residual + x, which is left in `residual`.

    Args:
        x: [..., size].
        residual: [rows, size] or contiguous in the shape of `x`.
        codes: an eight-bit type that the result is put into.

    Returns:
        [..., size], contiguous, and float32 [...] scales where there are `codes`.
    """
    shape, size = x.shape, x.shape[-1]
    if x.ndim > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, size).contiguous()
    rows, inner = x.numel() // size, x.shape[1] if x.ndim == 3 else 1
    outer_stride, inner_stride = x.stride(0), x.stride(1) if x.ndim == 3 else 0
    out = torch.empty(shape, dtype=codes or x.dtype, device=x.device)
    scales = None if codes is None else torch.empty(shape[:-1], dtype=torch.float32, device=x.device)
    if rows:
        launch = norm_launch(size)
        rms_norm_kernel[(triton.cdiv(rows, launch.constants["ROWS"]),)](
            x,
            residual,
            weight,
            out,
            scales,
            rows,
            size,
            inner,
            outer_stride,
            inner_stride,
            0 if residual is None else residual.stride(-2) if residual.ndim == 2 else size,
            eps,
            offset,
            OFFSET=offset != 0 or weight.dtype != x.dtype,
            **launch.options,
        )
    return out, scales
