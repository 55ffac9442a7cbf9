"""Low-rank products that are added to some rows of a product's result, as adapters (LoRA) of many requests need them.

A row's group says which weights it has. On a CPU in float32 compiled code computes each row by itself, in one call for
all groups; on a GPU the rows of all groups go down to the rank in one launch, and back in one launch for each part.
"""

import torch
from torch import Tensor

from troupellm.kernels.grouped_linear import grouped_linear
from troupellm.kernels.low_rank.native import low_rank_native, takes_native
from troupellm.kernels.low_rank.reference import low_rank_reference, multiply
from troupellm.kernels.low_rank.weights import GroupedRows, HostRows, LowRankWeights


def low_rank_add(
    x: Tensor, weights: LowRankWeights, rows: GroupedRows, out: Tensor, *, batch_invariant: bool = False
) -> None:
    """Change rows of `out`, in place: out * factor + x @ down.T @ up + bias of the row's group, for each part at its
    outputs.

    Args:
        x: [rows, in_features], the type of the weights; the numbers of a row lie side by side.
        out: [rows, out_features], the type of the weights, or float32 on a CPU; the numbers of a row lie side by side.
        batch_invariant: each row is computed alike, to the bit, beside any others.

    Rows that only the device knows are without their biases and factors.
    """
    if rows.host is not None and not any(weights.ranks[group] for group, _ in rows.host.runs):
        return
    if weights.by_kernels:
        if rows.host is not None:
            multiply(weights, rows.host, out)
        _by_kernels(x, weights, rows, out)
    elif takes_native(x, weights, out):
        multiply(weights, _known(rows), out)
        low_rank_native(x, weights, _known(rows), out)
    else:
        low_rank_reference(x, weights, _known(rows), out, batch_invariant=batch_invariant)


def _known(rows: GroupedRows) -> HostRows:
    if rows.host is None:
        raise ValueError("rows that only a device knows need its kernels")
    return rows.host


def _by_kernels(x: Tensor, weights: LowRankWeights, rows: GroupedRows, out: Tensor) -> None:
    inner = torch.zeros(x.shape[0], weights.down.shape[1], dtype=x.dtype, device=x.device)
    grouped_linear(x, weights.down, rows.device_rows, rows.starts, inner)
    for part, (begin, width, up) in enumerate(zip(weights.begins, weights.widths, weights.ups, strict=True)):
        first = part * weights.rank
        given = inner[:, first : first + weights.rank]
        grouped_linear(given, up.transpose(1, 2), rows.device_rows, rows.starts, out[:, begin : begin + width])
    if weights.bias is not None and rows.host is not None:
        counts = (rows.starts[1:] - rows.starts[:-1]).long()
        of_rows = torch.repeat_interleave(counts, output_size=rows.device_rows.shape[0])
        out.index_add_(0, rows.device_rows.long(), weights.bias[of_rows])
