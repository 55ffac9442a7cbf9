"""The definition of `rms_norm` in plain torch."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`: statistics in float32, rounded to the type of `x` before the weight."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight
