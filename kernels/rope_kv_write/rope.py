"""Rotary position embedding of query and key heads."""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each head's first values by the angles of its position; the others stay as they are.

    Args:
        x: [tokens, heads, head_dim], any float type, any strides; left as it is.
        cos: [tokens, 1, rotary_dim / 2], the type of `x`; already scaled where the rope scaling says so.
        sin: like `cos`.
        interleaved: the pairs that are rotated are neighbours; else the first half goes with the second.

    Returns:
        [tokens, heads, head_dim], contiguous, the type of `x`.
    """
    if by_kernels(x.device) and x.stride(-1) == 1:
        from troupellm.kernels.rope_kv_write.triton_rope import rope_triton

        return rope_triton(x, (cos, sin), interleaved=interleaved)
    if x.device.type != "cpu":
        return rope_reference(x, cos, sin, interleaved=interleaved)
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    left, right = x[..., first], x[..., second]
    torch.mul(left, cos, out=out[..., first]).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out[..., second]).addcmul_(left, sin)
    return out
