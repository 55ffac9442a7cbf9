"""The definition of `low_rank_add` in plain torch."""

import torch
from torch import Tensor

from troupellm.kernels.linear.batch_invariant import in_fixed_tiles
from troupellm.kernels.low_rank.weights import GroupedRows, LowRankWeights


def low_rank_reference(
    x: Tensor, weights: LowRankWeights, rows: GroupedRows, out: Tensor, *, batch_invariant: bool = False
) -> None:
    """As `low_rank_add`."""
    for group, places in rows.runs:
        if not weights.ranks[group]:
            continue
        found = (
            in_fixed_tiles(x[places], lambda tile, group=group: _product(tile, weights, group))
            if batch_invariant
            else _product(x[places], weights, group)
        ).to(out.dtype)
        if isinstance(places, slice):
            out[places] += found
        else:
            out.index_add_(0, places, found)


def _product(x: Tensor, weights: LowRankWeights, group: int) -> Tensor:
    """[rows, out_features] of rows [rows, in_features] of one group."""
    rank = int(weights.ranks[group])
    downs = weights.down[group].view(len(weights.ups), weights.rank, -1)[:, :rank]
    inner = x @ downs.flatten(0, 1).t()
    parts = [inner[:, part * rank : (part + 1) * rank] @ up[group, :rank] for part, up in enumerate(weights.ups)]
    found = torch.cat(parts, dim=1)
    return found if weights.bias is None else found + weights.bias[group]
