"""The gate of a gated feed-forward layer whose activation is a GELU, by its tanh approximation."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.act_quant import quantize_activation
from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.gated_act.gelu_reference import gelu_mul_reference


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, where gate and up are the halves of the last dimension.

    gelu(x) is x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), of Hendrycks and Gimpel 2016.

    Args:
        gate_up: [tokens, 2 * size], any float type; left as it is.

    Returns:
        [tokens, size], contiguous.
    """
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_triton

        return gate_triton(gate_up, "gelu")
    if gate_up.device.type != "cpu":
        return gelu_mul_reference(gate_up)
    size = gate_up.shape[-1] // 2
    return functional.gelu(gate_up[..., :size], approximate="tanh").mul_(gate_up[..., size:])


def gelu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `gelu_mul`: values of `dtype` [tokens, size] and scale float32 [tokens]."""
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_quantized_triton

        return gate_quantized_triton(gate_up, "gelu", dtype)
    return quantize_activation(gelu_mul(gate_up), dtype)
