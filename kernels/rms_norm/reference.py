"""The definition of `rms_norm` in plain torch."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As `rms_norm`: statistics in float32, rounded to the type of `x` before the weight.

    With an offset, or a weight in float32, the weight is weight + offset in float32 and the product is rounded once, as
    Gemma has it.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset or weight.dtype != x.dtype:
        return (scaled * (weight.float() + offset)).to(x.dtype)
    return scaled.to(x.dtype) * weight
