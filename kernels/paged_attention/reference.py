"""The definition of `paged_attention` in plain torch, one query token at a time."""

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.kv_quant import as_bytes, decode
from troupellm.kernels.paged_attention.tree import TreeMask


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    items: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree: TreeMask | None = None,
) -> Tensor:
    """Softmax attention in float32 of each item's query token over its keys.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, kv_heads, block_size, head_dim], any type of `kernels.kv_quant`.
        value_cache: like `key_cache`.
        block_tables: int32 [rows, width].
        items: int32 [items, 4]: token, row, first key position, key position past the last.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        sinks: float32 [heads], one more score per head, of a key without a value; None is without.
        tree: the keys of their item that tokens of trees see.

    Returns:
        [tokens, heads, head_dim], the type of `query`; tokens without an item are NaN.
    """
    _, kv_heads, block_size, _ = key_cache.shape
    size, kind = query.shape[2], key_cache.dtype
    key_cache, value_cache = as_bytes(key_cache), as_bytes(value_cache)
    out = torch.full_like(query, float("nan"))
    for token, row, begin, end in items.tolist():
        positions = torch.arange(begin, end, device=query.device)
        if tree is not None:
            positions = positions[torch.from_numpy(tree.visible(row, token, np.arange(begin, end))).to(query.device)]
        blocks, places = block_tables[row].long()[positions // block_size], positions % block_size
        keys = decode(key_cache[blocks, :, places].view(kind), torch.float32)
        values = decode(value_cache[blocks, :, places].view(kind), torch.float32)
        heads = query[token].float().view(kv_heads, -1, size)
        scores = torch.einsum("hgd,khd->hgk", heads, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(kv_heads, -1, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
        out[token] = torch.einsum("hgk,khd->hgd", weights, values).reshape(-1, size).to(out.dtype)
    return out
