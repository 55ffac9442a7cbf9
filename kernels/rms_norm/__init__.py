"""Root-mean-square normalisation, alone or after a residual addition."""

import functools

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.act_quant import quantize_activation
from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Scale the last dimension of `x` to unit root mean square, then by `weight`.

    Args:
        x: [..., size], any float type; left as it is.
        weight: [size], the type of `x`, or float32, which is rounded with the product alone.
        eps: added to the mean square.
        offset: added to the weight, in float32.

    Returns:
        [..., size], the type of `x`; computed in float32.
    """
    if _on_gpu(x):
        from troupellm.kernels.rms_norm.triton_norm import rms_norm_triton

        return rms_norm_triton(x, weight, eps, offset=offset)[0]
    if x.dtype != torch.float32 or x.device.type != "cpu" or offset:
        return rms_norm_reference(x, weight, eps, offset)
    # Torch's own operator is a chain of eight; for one token each of them costs more than its arithmetic.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(torch.from_numpy(_constant(eps)), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Add `x` to `residual` in place and return the norm of the sum; shapes and types as in `rms_norm`."""
    if _on_gpu(x) and residual.is_contiguous():
        from troupellm.kernels.rms_norm.triton_norm import rms_norm_triton

        return rms_norm_triton(x, weight, eps, offset=offset, residual=residual)[0]
    residual.add_(x)
    return rms_norm(residual, weight, eps, offset=offset)


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `rms_norm`, or of `add_rms_norm` where there is a residual.

    Args:
        x: [rows, size].
        dtype: int8 or float8_e4m3fn.

    Returns:
        values [rows, size] and scale float32 [rows].
    """
    if _on_gpu(x) and (residual is None or residual.is_contiguous()):
        from troupellm.kernels.rms_norm.triton_norm import rms_norm_triton

        values, scale = rms_norm_triton(x, weight, eps, offset=offset, residual=residual, codes=dtype)
        assert scale is not None
        return values, scale
    if residual is None:
        return quantize_activation(rms_norm(x, weight, eps, offset=offset), dtype)
    return quantize_activation(add_rms_norm(x, residual, weight, eps, offset=offset), dtype)


def _on_gpu(x: Tensor) -> bool:
    if not by_kernels(x.device):
        return False
    from troupellm.kernels.rms_norm.triton_norm import takes

    return takes(x)


@functools.cache
def _constant(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)
