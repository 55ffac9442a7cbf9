"""The definition of `rope` in plain torch."""

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """As `rope`."""
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        left, right = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)
    left, right = turned.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)
