"""Products of rows with a weight of their group each, in one launch, as adapters (LoRA) of many requests need them.

`kernels.low_rank` makes the two products of an adapter from it. It is not for mixtures of experts: `kernels.fused_moe`
has its products with gates and routing weights in them.
"""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.grouped_linear.reference import grouped_linear_reference


def grouped_linear(
    x: Tensor, weights: Tensor, rows: Tensor, starts: Tensor, out: Tensor, *, scales: Tensor | None = None
) -> None:
    """Add each row's product with the weight of its group to `out`, in place.

    Args:
        x: [all rows, in_features], any float type; the numbers of a row lie side by side.
        weights: [groups, out_features, in_features], the type of `x`, contiguous.
        rows: int32 [n], the rows that belong to a group, sorted by group and none twice; others stay as they are.
        starts: int32 [groups + 1], rising: rows[starts[g] : starts[g + 1]] belong to group g. They lie on the device,
            and what they say may change between launches of a graph.
        out: [all rows, out_features], the type of `x`; the numbers of a row lie side by side.
        scales: float32 [groups], factors on the groups' products; None is 1.
    """
    if not by_kernels(x.device) or x.dtype == torch.float64:
        grouped_linear_reference(x, weights, rows, starts, out, scales=scales)
        return
    from troupellm.kernels.grouped_linear.triton_grouped import grouped_linear_triton

    grouped_linear_triton(x, weights, rows, starts, out, scales=scales)
