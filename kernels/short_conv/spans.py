"""Where the rows of a flat batch lie, once for all layers with a convolution of the same length."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvSpans:
    """Spans of some rows, one after the other; all tensors are int64.

    The extended batch has the last taps - 1 inputs of each row in front of its span.
    """

    slots: Tensor
    """[rows], each row's slot of the state."""
    begins: Tensor
    """[rows], the first token of each span."""
    counts: Tensor
    """[rows], tokens of each span, at least one."""
    owner: Tensor
    """[tokens], index of each token's row."""
    places: Tensor
    """[tokens], where each token lies in the extended batch."""
    first: Tensor
    """[tokens], where the first input that it reads lies there."""
    before: Tensor
    """[rows * (taps - 1)], where the inputs from the state lie there."""
    after: Tensor
    """[rows * (taps - 1)], where the inputs that the state keeps lie there."""
    num_extended: int


def conv_spans(slots: Tensor, counts: Tensor, taps: int) -> ConvSpans:
    """
    Args:
        slots: int64 [rows], no slot twice.
        counts: int64 [rows], tokens of each row's span, at least one.
        taps: of the convolution, at least two.
    """
    kept, rows = taps - 1, counts.shape[0]
    numbers, ends = torch.arange(rows, device=counts.device), counts.cumsum(0)
    owner = numbers.repeat_interleave(counts)
    first = torch.arange(owner.shape[0], device=counts.device) + owner * kept
    steps = torch.arange(kept, device=counts.device)
    begins = ends - counts
    return ConvSpans(
        slots=slots,
        begins=begins,
        counts=counts,
        owner=owner,
        places=first + kept,
        first=first,
        before=((begins + numbers * kept)[:, None] + steps).flatten(),
        after=((ends + numbers * kept)[:, None] + steps).flatten(),
        num_extended=owner.shape[0] + rows * kept,
    )
