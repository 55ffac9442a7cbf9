"""The definition of `grouped_linear` in plain torch."""

from itertools import pairwise

from torch import Tensor


def grouped_linear_reference(
    x: Tensor, weights: Tensor, rows: Tensor, starts: Tensor, out: Tensor, *, scales: Tensor | None = None
) -> None:
    """As `grouped_linear`; float32, rounded once."""
    for group, (begin, end) in enumerate(pairwise(starts.tolist())):
        index = rows[begin:end].long()
        product = x[index].float() @ weights[group].float().t()
        if scales is not None:
            product = product * scales[group]
        out[index] = (out[index].float() + product).to(out.dtype)
