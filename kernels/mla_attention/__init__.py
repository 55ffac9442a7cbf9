"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a paged cache of latent vectors.

The cache holds one vector per token: a latent one, from which each head's key and value are products with the head's
own weights, and the rotated part of the key, which all heads share. There are two orders to compute in:

- absorbed: the key's weights are multiplied into the query and the value's into the result, so that all heads attend to
  the cache as it is, as if it were one KV head. A token reads each vector once: right for decoding.
- expanded: keys and values of all heads are made for a row's whole context. Each head then works with its own small
  vectors, which is less work where many tokens of a row share what was made: right for long pieces of a prompt.
"""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.paged_attention import Plan, dense, paged_attention
from troupellm.kernels.paged_attention.plan import AttentionPlan, PrefillSpan


def mla_attention(
    query: Tensor, cache: Tensor, plan: Plan, key_weight: Tensor, value_weight: Tensor, scale: float, *,
    batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to what the plan names. The step's own vectors have been written before.

    Args:
        query: [tokens, heads, plain + rotated], contiguous; as many tokens as the plan has.
        cache: [blocks, 1, block_size, latent + rotated], contiguous, the type of `query` or one of `kernels.kv_codes`.
        plan: of one KV head of the cache's width. What is not planned for this machine's CPU is absorbed.
        key_weight: [heads, plain, latent].
        value_weight: [heads, value, latent].
        scale: of the scores, before the softmax.
        batch_invariant: each token's products are computed alone, so that they do not depend on the batch.

    Returns:
        [tokens, heads, value], contiguous, the type of `query`.
    """
    least = expanding_tokens(key_weight, value_weight, query.shape[2] - key_weight.shape[1])
    if batch_invariant or not isinstance(plan, AttentionPlan) or not _expands(plan, least):
        parts = torch.split(query, 1) if batch_invariant else (query,)
        absorbed = torch.cat([_absorb(part, key_weight) for part in parts])
        mixed = paged_attention(absorbed, cache, cache, plan, scale)
        return torch.cat([_values(part, value_weight) for part in torch.split(mixed, parts[0].shape[0])])
    out = query.new_empty(query.shape[0], *value_weight.shape[:2])
    for span in plan.prefills:
        own = query[span.tokens]
        if own.shape[0] >= least:
            out[span.tokens] = _expanded(own, cache, span, key_weight, value_weight, scale)
        else:
            mixed = dense.prefill(_absorb(own, key_weight), cache, cache, span, scale)
            out[span.tokens] = _values(mixed, value_weight)
    for bucket in plan.buckets if plan.items.shape[0] else ():
        mixed = dense.decode(_absorb(query[bucket.tokens], key_weight), cache, cache, bucket, scale)
        out[bucket.tokens] = _values(mixed, value_weight)
    return out


def expanding_tokens(key_weight: Tensor, value_weight: Tensor, rotated: int) -> int:
    """From so many tokens of one row on, making its keys and values costs less than working with latent vectors.

    Per head and key, a token multiplies `latent + rotated` numbers for its score and `latent` for the value absorbed,
    `plain + rotated` and `value` expanded; to expand a key and its value takes `latent * (plain + value)`.
    """
    (_, plain, latent), value = key_weight.shape, value_weight.shape[1]
    saved = (latent + rotated + latent) - (plain + rotated + value)
    return max(2, -(-latent * (plain + value) // saved)) if saved > 0 else 1 << 30


def _expands(plan: AttentionPlan, least: int) -> bool:
    return not plan.by_token and any(span.tokens.stop - span.tokens.start >= least for span in plan.prefills)


def _absorb(query: Tensor, key_weight: Tensor) -> Tensor:
    """[tokens, heads, latent + rotated]: queries that meet the cache as it is."""
    plain = key_weight.shape[1]
    return torch.cat((torch.einsum("thp,hpl->thl", query[..., :plain], key_weight), query[..., plain:]), dim=-1)


def _values(mixed: Tensor, value_weight: Tensor) -> Tensor:
    """[tokens, heads, value] from mixtures of the cached vectors, whose rotated parts mean nothing as values."""
    return torch.einsum("thl,hvl->thv", mixed[..., : value_weight.shape[2]], value_weight).contiguous()


def _expanded(
    query: Tensor, cache: Tensor, span: PrefillSpan, key_weight: Tensor, value_weight: Tensor, scale: float
) -> Tensor:
    """Attention of one row's consecutive tokens [tokens, heads, plain + rotated], to [tokens, heads, value]."""
    heads, _, latent = key_weight.shape
    held = dense.gather(cache, span.gather, 1, query.dtype)[0, 0, span.keys]
    rotated = held[None, :, latent:].expand(heads, -1, -1)
    keys = torch.cat((held[:, :latent] @ key_weight.transpose(1, 2), rotated), dim=-1)
    values = held[:, :latent] @ value_weight.transpose(1, 2)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=span.mask, is_causal=span.mask is None,
        scale=scale,
    )  # fmt: skip
    return attended[0].transpose(0, 1)
