"""The definition of `short_conv` in plain torch, row by row."""

import torch
from torch import Tensor

from troupellm.kernels.short_conv.spans import ConvSpans


def short_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, spans: ConvSpans) -> Tensor:
    """As `short_conv`."""
    taps, out, begin = weight.shape[0], torch.empty_like(x), 0
    for slot, count in zip(spans.slots.tolist(), spans.counts.tolist(), strict=True):
        inputs = torch.cat((state[slot], x[begin : begin + count]))
        for place in range(count):
            total = (inputs[place : place + taps].float() * weight.float()).sum(0)
            out[begin + place] = (total if bias is None else total + bias.float()).to(x.dtype)
        state[slot] = inputs[count:]
        begin += count
    return out
