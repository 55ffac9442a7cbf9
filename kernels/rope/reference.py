"""The definition of `rope` in plain torch."""

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rope`."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
