"""Root-mean-square normalisation, alone or after a residual addition."""

import functools

import torch
from torch import Tensor

from troupellm.kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to unit root mean square, then by `weight`.

    Args:
        x: [..., size], any float type; left as it is.
        weight: [size], the type of `x`.
        eps: added to the mean square.

    Returns:
        [..., size], the type of `x`; computed in float32.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return rms_norm_reference(x, weight, eps)
    # Torch's own operator is a chain of eight; for one token each of them costs more than its arithmetic.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return the norm of the sum; shapes and types as in `rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


@functools.cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
