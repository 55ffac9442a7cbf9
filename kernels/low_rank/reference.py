"""The definition of `low_rank_add` in plain torch."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.linear.batch_invariant import in_fixed_tiles
from troupellm.kernels.low_rank.weights import HostRows, LowRankWeights


def low_rank_reference(
    x: Tensor, weights: LowRankWeights, rows: HostRows, out: Tensor, *, batch_invariant: bool = False
) -> None:
    """As `low_rank_add`."""
    multiply(weights, rows, out)
    for group, places in rows.runs:
        if not weights.ranks[group]:
            continue
        if batch_invariant:
            found = in_fixed_tiles(x[places], partial(_product, weights=weights, group=group, contiguous=True))
        else:
            found = _product(x[places], weights, group)
        found = found.to(out.dtype)
        if isinstance(places, slice):
            out[places] += found
        else:
            out.index_add_(0, places, found)


def multiply(weights: LowRankWeights, rows: HostRows, out: Tensor) -> None:
    """Multiply rows [rows, out_features] by their groups' factors, in place."""
    if weights.factors is not None:
        for group, places in rows.runs:
            out[places] *= weights.factors[group]


def _product(x: Tensor, weights: LowRankWeights, group: int, *, contiguous: bool = False) -> Tensor:
    """[rows, out_features] of rows [rows, in_features] of one group.

    Args:
        contiguous: weights lie as a library computes each row of a tile alike; it does not do so for all layouts.
    """
    rank = int(weights.ranks[group])
    downs = weights.down[group].view(len(weights.ups), weights.rank, -1)[:, :rank]
    inner = functional.linear(x, downs.flatten(0, 1))
    parts = []
    for part, up in enumerate(weights.ups):
        given, weight = inner[:, part * rank : (part + 1) * rank], up[group, :rank].t()
        parts.append(functional.linear(*((given.contiguous(), weight.contiguous()) if contiguous else (given, weight))))
    found = torch.cat(parts, dim=1)
    return found if weights.bias is None else found + weights.bias[group]
