"""Mixture of experts: the choice of experts per token, and the sum of the chosen experts' gated products.

On a CPU: one product per used expert through `kernels.linear`. On a GPU: the Triton kernels of this folder, without a
sort for a few tokens. On any other device: the operations of the CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.fused_moe.experts import experts_by_products
from troupellm.kernels.fused_moe.reference import route_reference
from troupellm.kernels.fused_moe.spec import SILU, Routing, Swiglu
from troupellm.kernels.fused_moe.stacked import StackedExperts, stack
from troupellm.kernels.linear import PackedLinear, pack
from troupellm.kernels.quantized_linear import QuantizedWeight, Weight

__all__ = ["SILU", "PackedExperts", "Routing", "Swiglu", "fused_moe", "pack_experts", "route"]


class PackedExperts:
    """All experts of one layer, made ready for many products: one by one, or all in one tensor for a GPU."""

    __slots__ = ("down", "gate_up", "stacked", "swiglu")

    def __init__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        swiglu: Swiglu,
        stacked: StackedExperts | None = None,
    ) -> None:
        """
        Args:
            gate_up: per expert [2 * size, hidden], rows of the gate first; empty with `stacked`.
            down: per expert [hidden, size]; empty with `stacked`.
        """
        self.gate_up, self.down, self.swiglu, self.stacked = tuple(gate_up), tuple(down), swiglu, stacked


def pack_experts(
    gate_up: Sequence[Weight],
    down: Sequence[Weight],
    swiglu: Swiglu = SILU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> PackedExperts:
    """Make a layer's experts ready for `fused_moe`.

    Args:
        gate_up: per expert [2 * size, hidden], rows of the gate first, any float type or quantized.
        down: per expert [hidden, size].
        gate_up_bias, down_bias: [experts, 2 * size] and [experts, hidden], or None.
    """
    if by_kernels(_device(gate_up[0])):
        stacked = StackedExperts(stack(gate_up), stack(down), gate_up_bias, down_bias, swiglu)
        return PackedExperts((), (), swiglu, stacked)

    def packed(weights: Sequence[Weight], biases: Tensor | None) -> list[PackedLinear]:
        return [pack(weight, None if biases is None else biases[expert]) for expert, weight in enumerate(weights)]

    return PackedExperts(packed(gate_up, gate_up_bias), packed(down, down_bias), swiglu)


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: the router's, [tokens, experts], any float type; at least `top_k` experts.
        choice_bias: float32 [experts], added to the scores while experts are chosen, but not to their weights
            (DeepSeek-V3, section 2.1.2).

    Returns:
        weights float32 [tokens, top_k] and expert ids [tokens, top_k], int64, on a GPU int32.
    """
    if by_kernels(logits.device):
        from troupellm.kernels.fused_moe.triton_route import route_triton

        return route_triton(logits, routing, choice_bias)
    return route_reference(logits, routing, choice_bias)


def fused_moe(
    x: Tensor, weights: Tensor, ids: Tensor, experts: PackedExperts, *, batch_invariant: bool = False
) -> Tensor:
    """The sum over a token's experts of weight * down(gate(gate_up(x))).

    Args:
        x: [tokens, hidden], the type of the experts.
        weights, ids: from `route`.
        batch_invariant: on a GPU, one path and one tile size for any number of tokens. On a CPU a token's experts are
            always added in the same order, and `linear` provides the rest.

    Returns:
        [tokens, hidden].
    """
    if experts.stacked is not None:
        from troupellm.kernels.fused_moe.triton_launch import fused_moe_triton

        return fused_moe_triton(x, weights, ids, experts.stacked, batch_invariant=batch_invariant)
    return experts_by_products(x, weights, ids, experts.gate_up, experts.down, experts.swiglu)


def _device(weight: Weight) -> torch.device:
    return weight.tensors()[0].device if isinstance(weight, QuantizedWeight) else weight.device
