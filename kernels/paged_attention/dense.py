"""Paged attention with torch's own operators: blocks are gathered, then attended to as dense tensors."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.paged_attention.plan import Bucket, PrefillSpan


def prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, span: PrefillSpan, scale: float) -> Tensor:
    """Attention of one row's consecutive query tokens.

    Args:
        query: [tokens, heads, head_dim] of the span alone.

    Returns:
        [tokens, heads, head_dim], a view.
    """
    keys, values = (_gather(cache, span.gather, 1)[:, :, span.keys] for cache in (key_cache, value_cache))
    grouped = query.shape[1] != keys.shape[1]
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=span.mask, is_causal=span.mask is None, scale=scale,
        enable_gqa=grouped,
    )  # fmt: skip
    return attended[0].transpose(0, 1)


def decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """Attention of single query tokens; the heads of a KV head's group become its query rows.

    Args:
        query: [items, heads, head_dim] of the bucket alone.

    Returns:
        [items, heads, head_dim].
    """
    items, heads, size = query.shape
    kv_heads = key_cache.shape[1]
    # What a block holds beyond a row's keys may be anything, NaN included, and 0 * NaN is NaN.
    keys, values = (
        _gather(cache, bucket.gather, items).masked_fill_(bucket.hidden, 0) for cache in (key_cache, value_cache)
    )
    mask = torch.zeros(items, 1, 1, keys.shape[2], dtype=query.dtype)
    mask.masked_fill_(bucket.hidden.transpose(2, 3), float("-inf"))
    folded = query.reshape(items, kv_heads, heads // kv_heads, size)
    attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(items, heads, size)


def _gather(cache: Tensor, rows: Tensor, items: int) -> Tensor:
    """[items, kv_heads, keys, head_dim]: whole blocks of each head, copied together."""
    _, kv_heads, block_size, size = cache.shape
    return cache.view(-1, block_size, size).index_select(0, rows).view(items, kv_heads, -1, size)
