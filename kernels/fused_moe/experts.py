"""Experts through the packed products of `linear`: assignments sorted by expert, one product per expert that is used.

The Python loop is over the experts in use; whatever is done per token is one operation over all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.spec import Swiglu
from troupellm.kernels.linear import PackedLinear, linear
from troupellm.kernels.silu_mul import silu_mul


def gated(gate_up: Tensor, swiglu: Swiglu) -> Tensor:
    """The gate between an expert's two products.

    Args:
        gate_up: [rows, 2 * size], the gate's half first; may be overwritten.

    Returns:
        [rows, size].
    """
    if swiglu.limit is None:
        return silu_mul(gate_up)
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :size].clamp_(max=swiglu.limit), gate_up[:, size:].clamp_(-swiglu.limit, swiglu.limit)
    return torch.sigmoid(gate * swiglu.alpha).mul_(gate).mul_(up.add_(1))


def experts_by_products(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    swiglu: Swiglu,
) -> Tensor:
    """As `fused_moe`. Each token's experts are added up in the order of `ids`, whatever else is in the batch."""
    tokens, top_k = ids.shape
    if tokens == 0:  # the last layer of a piece that no logits are wanted of
        return torch.zeros_like(x)
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    used = [(expert, rows) for expert, rows in enumerate(flat.bincount(minlength=len(down)).tolist()) if rows]
    hidden = gated(_products(x[order // top_k], gate_up, used), swiglu)
    results = _products(hidden, down, used)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), results[places].view(tokens, top_k, -1)).squeeze(1)


def _products(rows: Tensor, packed: Sequence[PackedLinear], used: Sequence[tuple[int, int]]) -> Tensor:
    """rows: sorted by expert; used: expert and how many rows it has."""
    begin, pieces = 0, []
    for expert, count in used:
        pieces.append(linear(rows[begin : begin + count], packed[expert]))
        begin += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
