"""The definition of `mla_attention` in plain torch, one query token at a time."""

import torch
from torch import Tensor


def mla_attention_reference(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    items: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
) -> Tensor:
    """Keys and values of every head are made from the latent vectors, then attended to, in float32.

    Args:
        query: [tokens, heads, plain + rotated].
        cache: [blocks, 1, block_size, latent + rotated].
        block_tables: int32 [rows, width].
        items: int32 [items, 4]: token, row, first key position, key position past the last.
        key_weight: [heads, plain, latent].
        value_weight: [heads, value, latent].

    Returns:
        [tokens, heads, value], the type of `query`; tokens without an item are NaN.
    """
    (heads, plain, latent), block_size = key_weight.shape, cache.shape[2]
    out = query.new_full((query.shape[0], heads, value_weight.shape[1]), float("nan"))
    for token, row, begin, end in items.tolist():
        positions = torch.arange(begin, end, device=query.device)
        held = cache[block_tables[row].long()[positions // block_size], 0, positions % block_size].float()
        keys = torch.einsum("kl,hpl->hkp", held[:, :latent], key_weight.float())
        values = torch.einsum("kl,hvl->hkv", held[:, :latent], value_weight.float())
        own = query[token].float()
        scores = torch.einsum("hp,hkp->hk", own[:, :plain], keys) + own[:, plain:] @ held[:, latent:].T
        weights = torch.softmax(scores * scale, dim=-1)
        out[token] = torch.einsum("hk,hkv->hv", weights, values).to(out.dtype)
    return out
