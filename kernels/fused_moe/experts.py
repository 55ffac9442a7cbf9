"""Experts through the packed products of `linear`: assignments sorted by expert, one product per expert that is used.

The Python loop is over the experts in use; each operation on tokens covers all of them at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.sigmoid import batch_invariant_sigmoid
from troupellm.kernels.fused_moe.spec import Swiglu
from troupellm.kernels.linear import GATES, PackedLinear, gated_linear, linear, linear_add

AddToExpert = Callable[[str, int, Tensor, Tensor, Tensor], None]
"""Adds to the rows of one expert's product, in place: "gate_up" or "down", the expert, the tokens int64 [rows] that the
rows belong to, the input [rows, in_features] and the product [rows, out_features]."""
Product = Callable[[Tensor, PackedLinear], Tensor]


def gated_product(swiglu: Swiglu) -> Product:
    """The first product of an expert with the gate behind it: [rows, hidden] to [rows, size]."""
    if swiglu.limit is None:
        return lambda x, gate_up: gated_linear(x, gate_up, swiglu.activation)
    return lambda x, gate_up: clamped_gate(linear(x, gate_up), swiglu, invariant=gate_up.invariant)


def clamped_gate(gate_up: Tensor, swiglu: Swiglu, *, invariant: bool = False) -> Tensor:
    """The gate of `Swiglu` with a limit.

    Args:
        gate_up: [rows, 2 * size], the gate's half first; overwritten.
        invariant: no row depends on how many there are.

    Returns:
        [rows, size].
    """
    size, limit = gate_up.shape[-1] // 2, swiglu.limit
    assert limit is not None
    gate, up = gate_up[:, :size].clamp_(max=limit), gate_up[:, size:].clamp_(-limit, limit)
    sigmoid = batch_invariant_sigmoid if invariant else torch.sigmoid
    return sigmoid(gate * swiglu.alpha).mul_(gate).mul_(up.add_(1))


def experts_by_products(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    swiglu: Swiglu,
) -> Tensor:
    """As `fused_moe`. Each token's experts are added in the order of `ids`, in any batch."""
    tokens, top_k = ids.shape
    if tokens == 0:  # the last layer of a piece from which no logits are needed
        return torch.zeros_like(x)
    gated, invariant = gated_product(swiglu), down[0].invariant
    if tokens == 1 and not invariant:  # nothing to sort; what behind a batch is a sum is done by the products here
        total = torch.zeros_like(x)
        for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
            linear_add(gated(x, gate_up[expert]), down[expert], total, weight)
        return total
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    used = [(expert, rows) for expert, rows in enumerate(flat.bincount(minlength=len(down)).tolist()) if rows]
    hidden = _each(gated, x[order // top_k], gate_up, used)
    results = _each(linear, hidden, down, used)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return _weighted_sum(results[places].view(tokens, top_k, -1), weights.to(x.dtype), invariant=invariant)


def experts_with_additions(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    swiglu: Swiglu,
    add: AddToExpert,
) -> Tensor:
    """As `experts_by_products`, with an addition to each product."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    results = x.new_empty(order.shape[0], x.shape[1])
    begin = 0
    for expert, count in enumerate(flat.bincount(minlength=len(down)).tolist()):
        if not count:
            continue
        places = order[begin : begin + count]
        begin += count
        of_tokens = places // top_k
        rows = x[of_tokens]
        wide = linear(rows, gate_up[expert])
        add("gate_up", expert, of_tokens, rows, wide)
        between = GATES[swiglu.activation](wide) if swiglu.limit is None else clamped_gate(wide, swiglu)
        narrow = linear(between, down[expert])
        add("down", expert, of_tokens, between, narrow)
        results[places] = narrow
    return _weighted_sum(results.view(tokens, top_k, -1), weights.to(x.dtype), invariant=False)


def _each(product: Product, rows: Tensor, packed: Sequence[PackedLinear], used: Sequence[tuple[int, int]]) -> Tensor:
    """rows: sorted by expert; used: expert and how many rows it has."""
    begin, pieces = 0, []
    for expert, count in used:
        pieces.append(product(rows[begin : begin + count], packed[expert]))
        begin += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _weighted_sum(results: Tensor, weights: Tensor, *, invariant: bool) -> Tensor:
    """results: [tokens, top_k, hidden]; weights: [tokens, top_k]."""
    if not invariant:
        return torch.bmm(weights.unsqueeze(1), results).squeeze(1)
    total = results[:, 0] * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total.addcmul_(results[:, place], weights[:, place : place + 1])
    return total
