"""Inputs of products in eight bits: each row of a matrix with a scale of its own."""

import torch
from torch import Tensor

from troupellm.kernels.act_quant.reference import quantize_activation_reference
from troupellm.kernels.common.triton import by_kernels


def quantize_activation(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row to the nearest values of `dtype`, scaled to its whole range.

    Args:
        x: [rows, size], any float type; the numbers of a row lie side by side.
        dtype: int8, of which -127 to 127 are used, or float8_e4m3fn.

    Returns:
        values of `dtype` [rows, size], contiguous, and scale float32 [rows]: x is about values * scale.
    """
    if not by_kernels(x.device):
        return quantize_activation_reference(x, dtype)
    from troupellm.kernels.act_quant.triton_act_quant import quantize_activation_triton

    return quantize_activation_triton(x, dtype)
