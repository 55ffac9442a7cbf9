"""Mixture of experts: the choice of experts per token, and the sum of the chosen experts' gated products."""

from collections.abc import Sequence

from torch import Tensor

from troupellm.kernels.fused_moe.experts import experts_by_products
from troupellm.kernels.fused_moe.reference import route_reference
from troupellm.kernels.fused_moe.spec import SILU, Routing, Swiglu
from troupellm.kernels.linear import PackedLinear

__all__ = ["SILU", "PackedExperts", "Routing", "Swiglu", "fused_moe", "route"]


class PackedExperts:
    """All experts of one layer, made ready for many products."""

    __slots__ = ("down", "gate_up", "swiglu")

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], swiglu: Swiglu = SILU) -> None:
        """
        Args:
            gate_up: per expert [2 * size, hidden], rows of the gate first.
            down: per expert [hidden, size].
        """
        self.gate_up, self.down, self.swiglu = tuple(gate_up), tuple(down), swiglu


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: the router's, [tokens, experts], any float type; at least `top_k` experts.
        choice_bias: float32 [experts], added to the scores while experts are chosen, but not to their weights
            (DeepSeek-V3, section 2.1.2).

    Returns:
        weights float32 [tokens, top_k] and expert ids int64 [tokens, top_k].
    """
    return route_reference(logits, routing, choice_bias)


def fused_moe(x: Tensor, weights: Tensor, ids: Tensor, experts: PackedExperts) -> Tensor:
    """The sum over a token's experts of weight * down(gate(gate_up(x))).

    Args:
        x: [tokens, hidden], the type of the experts.
        weights: float32 [tokens, top_k].
        ids: int64 [tokens, top_k], the experts of each token.

    Returns:
        [tokens, hidden].
    """
    return experts_by_products(x, weights, ids, experts.gate_up, experts.down, experts.swiglu)
