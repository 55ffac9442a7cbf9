"""The gates of gated feed-forward layers: an activation of one half of the last dimension, times the other half."""

from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.act_quant import quantize_activation
from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.gated_act.reference import gelu_mul_reference, silu_mul_reference

_GELU: Final = partial(functional.gelu, approximate="tanh")


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension.

    Args:
        gate_up: [tokens, 2 * size], any float type; left as it is.

    Returns:
        [tokens, size], contiguous.
    """
    return _gate(gate_up, "silu", functional.silu, silu_mul_reference)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, as `silu_mul`.

    gelu(x) is x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), of Hendrycks and Gimpel 2016.
    """
    return _gate(gate_up, "gelu", _GELU, gelu_mul_reference)


def silu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `silu_mul`: values of `dtype` [tokens, size] and scale float32 [tokens]."""
    return _codes(gate_up, "silu", dtype, silu_mul)


def gelu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `gelu_mul`, as `silu_mul_quantized`."""
    return _codes(gate_up, "gelu", dtype, gelu_mul)


def _gate(
    gate_up: Tensor,
    name: Literal["silu", "gelu"],
    activation: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
) -> Tensor:
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_triton

        return gate_triton(gate_up, name)
    if gate_up.device.type != "cpu":
        return reference(gate_up)
    size = gate_up.shape[-1] // 2
    return activation(gate_up[..., :size]).mul_(gate_up[..., size:])


def _codes(
    gate_up: Tensor, name: Literal["silu", "gelu"], dtype: torch.dtype, gate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    if by_kernels(gate_up.device):
        from troupellm.kernels.gated_act.triton_gate import gate_quantized_triton

        return gate_quantized_triton(gate_up, name, dtype)
    return quantize_activation(gate(gate_up), dtype)
