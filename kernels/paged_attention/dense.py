"""Paged attention with torch's own operators: blocks are gathered, then used as dense tensors."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import kv_quant
from troupellm.kernels.paged_attention.plan import Bucket, PrefillSpan


def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    span: PrefillSpan,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one row's consecutive query tokens.

    Args:
        query: [tokens, heads, head_dim] of the span alone.

    Returns:
        [tokens, heads, head_dim], a view.
    """
    keys, values = (gather(cache, span.gather, 1, query.dtype)[:, :, span.keys] for cache in (key_cache, value_cache))
    if softcap or sinks is not None:
        mask = span.mask
        if mask is None:
            mask = torch.ones(query.shape[0], keys.shape[2], dtype=torch.bool).tril()
        tokens, heads, size = query.shape
        folded = query.view(1, tokens, keys.shape[1], -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        hidden = ~mask.repeat(heads // keys.shape[1], 1)
        mixed = _softmax_product(folded, keys, values, hidden, scale, softcap, sinks)
        return mixed.view(heads, tokens, size).transpose(0, 1)
    grouped = query.shape[1] != keys.shape[1]
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        scale=scale,
        enable_gqa=grouped,
    )
    return attended[0].transpose(0, 1)


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    bucket: Bucket,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of single query tokens; the heads of a KV head's group become its query rows.

    Args:
        query: [items, heads, head_dim] of the bucket alone.

    Returns:
        [items, heads, head_dim].
    """
    items, heads, size = query.shape
    kv_heads = key_cache.shape[1]
    # Beyond a row's keys a block may hold anything, NaN included, and 0 * NaN is NaN.
    keys, values = (
        gather(cache, bucket.gather, items, query.dtype).masked_fill_(bucket.hidden, 0)
        for cache in (key_cache, value_cache)
    )
    folded = query.reshape(items, kv_heads, heads // kv_heads, size)
    if softcap or sinks is not None:
        hidden = bucket.hidden.transpose(2, 3)
        return _softmax_product(folded, keys, values, hidden, scale, softcap, sinks).view(items, heads, size)
    mask = torch.zeros(items, 1, 1, keys.shape[2], dtype=query.dtype)
    mask.masked_fill_(bucket.hidden.transpose(2, 3), float("-inf"))
    attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(items, heads, size)


def _softmax_product(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention that torch's fused operator lacks: scores in float32, capped, with a sink per head.

    Args:
        query: [items, kv_heads, rows, head_dim]; the rows of each KV head are those of its first query head, then of
            its second, and so on.
        hidden: bool, broadcast over [items, kv_heads, rows, keys].
    """
    scores = (query @ keys.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        items, kv_heads, rows, _ = scores.shape
        per_row = sinks.float().view(kv_heads, -1, 1).repeat_interleave(rows * kv_heads // sinks.shape[0], dim=1)
        scores = torch.cat((scores, per_row.expand(items, kv_heads, rows, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


def gather(cache: Tensor, rows: Tensor, items: int, dtype: torch.dtype) -> Tensor:
    """[items, kv_heads, keys, head_dim]: whole blocks of each head, copied together."""
    _, kv_heads, block_size, width = cache.shape
    flat = kv_quant.as_bytes(cache).view(-1, block_size, width)
    gathered = flat.index_select(0, rows).view(items, kv_heads, -1, width)
    return gathered if cache.dtype == dtype else kv_quant.decode(gathered.view(cache.dtype), dtype)
