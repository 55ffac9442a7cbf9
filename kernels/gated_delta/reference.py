"""The definition of `gated_delta` in plain torch, token by token."""

import torch
from torch import Tensor

from troupellm.kernels.short_conv.spans import ConvSpans


def gated_delta_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, spans: ConvSpans
) -> Tensor:
    """As `gated_delta`."""
    shared = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
    out, begin = torch.empty_like(value), 0
    for slot, count in zip(spans.slots.tolist(), spans.counts.tolist(), strict=True):
        held = state[slot].clone()
        for token in range(begin, begin + count):
            held *= decay[token].exp()[:, None, None]
            change = value[token]
            if beta is not None:
                change = (change - (held * key[token][:, :, None]).sum(1)) * beta[token][:, None]
            held += key[token][:, :, None] * change[:, None]
            out[token] = (held * query[token][:, :, None]).sum(1)
        state[slot] = held
        begin += count
    return out
