"""The gate of a gated feed-forward layer."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.act_quant import quantize_activation
from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.gated_act.silu_reference import silu_mul_reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension.

    Args:
        gate_up: [tokens, 2 * size], any float type; left as it is.

    Returns:
        [tokens, size], contiguous.
    """
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_triton

        return gate_triton(gate_up, "silu")
    if gate_up.device.type != "cpu":
        return silu_mul_reference(gate_up)
    size = gate_up.shape[-1] // 2
    return functional.silu(gate_up[..., :size]).mul_(gate_up[..., size:])


def silu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `silu_mul`: values of `dtype` [tokens, size] and scale float32 [tokens]."""
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_quantized_triton

        return gate_quantized_triton(gate_up, "silu", dtype)
    return quantize_activation(silu_mul(gate_up), dtype)
