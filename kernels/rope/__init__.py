"""Rotary position embedding of query and key heads."""

import torch
from torch import Tensor

from troupellm.kernels.rope.reference import rope_reference


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head: the first half of its values with the second half, by the angle of its position.

    Args:
        x: [tokens, heads, head_dim], any float type, any strides; left as it is.
        cos: [tokens, 1, head_dim / 2], the type of `x`; already scaled where the rope scaling says so.
        sin: like `cos`.

    Returns:
        [tokens, heads, head_dim], contiguous, the type of `x`.
    """
    if x.device.type != "cpu":
        return rope_reference(x, cos, sin)
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.mul(left, cos, out=out[..., :half]).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out[..., half:]).addcmul_(left, sin)
    return out
