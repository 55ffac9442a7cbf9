"""The definition of routing and of a mixture of experts in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.fused_moe.sigmoid import batch_invariant_sigmoid
from troupellm.kernels.fused_moe.spec import Routing, Swiglu


def route_reference(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `route`."""
    scores = logits.float()
    if routing.scoring == "softmax":
        scores = scores.softmax(dim=-1)
    elif routing.scoring == "sigmoid":
        scores = batch_invariant_sigmoid(scores)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.groups > 1:
        choice = choice.masked_fill(~_best_groups(choice, routing), float("-inf"))
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


def _best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """bool [tokens, experts]: whether an expert's group is among the best."""
    grouped = choice.view(choice.shape[0], routing.groups, choice.shape[1] // routing.groups)
    worth = grouped.amax(dim=-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = worth.topk(routing.top_groups, dim=-1).indices
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return chosen.repeat_interleave(grouped.shape[-1], dim=1)


def gated_reference(gate_up: Tensor, swiglu: Swiglu) -> Tensor:
    """As `gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if swiglu.limit is None:
        bent = functional.silu(gate) if swiglu.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return bent * up
    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return gate * torch.sigmoid(gate * swiglu.alpha) * (up + 1)


def fused_moe_reference(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    swiglu: Swiglu,
    gate_up_bias: Sequence[Tensor] | None = None,
    down_bias: Sequence[Tensor] | None = None,
) -> Tensor:
    """Token by token, expert by expert, as `fused_moe` says; computed in float32.

    Args:
        gate_up: per expert [2 * size, hidden], rows of the gate first.
        down: per expert [hidden, size].
        gate_up_bias, down_bias: per expert [2 * size] and [hidden].
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(x.shape[0]):
        for place in range(ids.shape[1]):
            expert = int(ids[token, place])
            hidden = gate_up[expert].float() @ x[token].float()
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[expert].float()
            out = down[expert].float() @ gated_reference(hidden, swiglu)
            if down_bias is not None:
                out = out + down_bias[expert].float()
            total[token] += weights[token, place] * out
    return total.to(x.dtype)
