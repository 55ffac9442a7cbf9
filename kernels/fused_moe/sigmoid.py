"""A sigmoid whose results do not depend on their place in the tensor."""

import torch
from torch import Tensor


def batch_invariant_sigmoid(x: Tensor) -> Tensor:
    """sigmoid(x), each number as if it were alone, to the bit.

    On a CPU torch computes whole vectors by one routine and the rest of a tensor, or of a thread's part of it, by
    another, so a number changes its last bit with the number of rows. Its `exp` does not, and what is added here is
    rounded correctly by both.

    Args:
        x: any shape and float type; left as it is.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)
