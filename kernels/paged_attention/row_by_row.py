"""Attention of one row at a time with torch's own operators: scaled_dot_product_attention, or flex attention.

A sink is one more key and value of zeros, whose score is replaced: no operator of torch knows sinks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.paged_attention.row_plan import RowSpan

NEVER = float("-inf")


def sdpa(
    query: Tensor, keys: Tensor, values: Tensor, span: RowSpan, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """By `scaled_dot_product_attention`, which has no soft cap.

    Args:
        query: [heads, tokens, head_dim].
        keys: [kv_heads, keys, head_dim]; values: the same.

    Returns:
        [heads, tokens, head_dim].
    """
    if softcap:
        raise ValueError("scaled_dot_product_attention has no soft cap")
    mask: Tensor = span.seen
    if sinks is not None:
        keys, values = functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1))
        bias = torch.zeros(span.seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~span.seen, NEVER)
        extra = sinks.to(query.dtype).view(-1, 1, 1).expand(-1, bias.shape[0], 1)
        mask = torch.cat((bias.expand(query.shape[0], -1, -1), extra), dim=2)
    return functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=query.shape[0] != keys.shape[0]
    )[0]


def flex(
    query: Tensor, keys: Tensor, values: Tensor, span: RowSpan, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention by flex attention, compiled on a GPU; elsewhere torch's own slow definition. Arguments as of `sdpa`."""
    seen, real = span.seen, span.seen.shape[1]
    if sinks is not None:
        keys, values = functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1))
        seen = functional.pad(seen, (0, 1), value=True)

    def change(score: Tensor, batch: Tensor, head: Tensor, token: Tensor, key: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if sinks is not None:
            score = torch.where(key == real, sinks[head].to(score.dtype), score)
        return torch.where(seen[token, key], score, NEVER)

    attended: Tensor = _flex_attention(query.device.type == "cuda")(
        query[None], keys[None], values[None], score_mod=change, scale=scale, enable_gqa=query.shape[0] != keys.shape[0]
    )
    return attended[0]


@cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=True) if compiled else plain
