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

from troupellm.kernels.paged_attention import dense, paged_attention
from troupellm.kernels.paged_attention.plan import AttentionPlan, PrefillSpan


def mla_attention(
    query: Tensor, cache: Tensor, plan: AttentionPlan, key_weight: Tensor, value_weight: Tensor, scale: float
) -> Tensor:
    """Attend to what the plan names. The step's own vectors have been written before.

    Args:
        query: [tokens, heads, plain + rotated], contiguous; as many tokens as the plan has.
        cache: [blocks, 1, block_size, latent + rotated], contiguous, the type of `query`.
        key_weight: [heads, plain, latent].
        value_weight: [heads, value, latent].
        scale: of the scores, before the softmax.

    Returns:
        [tokens, heads, value], contiguous, the type of `query`.
    """
    least = expanding_tokens(key_weight, value_weight, query.shape[2] - key_weight.shape[1])
    spans = () if plan.by_token else plan.prefills
    if all(span.tokens.stop - span.tokens.start < least for span in spans):
        mixed = paged_attention(_absorb(query, key_weight, plan), cache, cache, plan, scale)
        return _values(mixed, value_weight, plan)
    out = query.new_empty(query.shape[0], *value_weight.shape[:2])
    for span in spans:
        own = query[span.tokens]
        if own.shape[0] >= least:
            out[span.tokens] = _expanded(own, cache, span, key_weight, value_weight, scale)
        else:
            mixed = dense.prefill(_absorb(own, key_weight, plan), cache, cache, span, scale)
            out[span.tokens] = _values(mixed, value_weight, plan)
    for bucket in plan.buckets if plan.items.shape[0] else ():
        mixed = dense.decode(_absorb(query[bucket.tokens], key_weight, plan), cache, cache, bucket, scale)
        out[bucket.tokens] = _values(mixed, value_weight, plan)
    return out


def expanding_tokens(key_weight: Tensor, value_weight: Tensor, rotated: int) -> int:
    """From so many tokens of one row on, making its keys and values costs less than working with latent vectors.

    Per head and key, a token multiplies `latent + rotated` numbers for its score and `latent` for the value absorbed,
    `plain + rotated` and `value` expanded; to expand a key and its value takes `latent * (plain + value)`.
    """
    (_, plain, latent), value = key_weight.shape, value_weight.shape[1]
    saved = (latent + rotated + latent) - (plain + rotated + value)
    return max(2, -(-latent * (plain + value) // saved)) if saved > 0 else 1 << 30


def _absorb(query: Tensor, key_weight: Tensor, plan: AttentionPlan) -> Tensor:
    """[tokens, heads, latent + rotated]: queries that meet the cache as it is."""
    plain = key_weight.shape[1]
    latent = _per_head(query[..., :plain], key_weight, plan)
    return torch.cat((latent, query[..., plain:]), dim=-1)


def _values(mixed: Tensor, value_weight: Tensor, plan: AttentionPlan) -> Tensor:
    """[tokens, heads, value] from mixtures of the cached vectors, whose rotated parts mean nothing as values."""
    return _per_head(mixed[..., : value_weight.shape[2]], value_weight.transpose(1, 2), plan).contiguous()


def _per_head(x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    """[tokens, heads, n] times [heads, n, m]; token by token where the plan wants results that do not depend on
    what else is there."""
    if plan.by_token and x.shape[0] > 1:
        return torch.cat([torch.einsum("thn,hnm->thm", token, weight) for token in torch.split(x, 1)])
    return torch.einsum("thn,hnm->thm", x, weight)


def _expanded(
    query: Tensor, cache: Tensor, span: PrefillSpan, key_weight: Tensor, value_weight: Tensor, scale: float
) -> Tensor:
    """Attention of one row's consecutive tokens [tokens, heads, plain + rotated], to [tokens, heads, value]."""
    (heads, _, latent), width = key_weight.shape, cache.shape[3]
    held = cache.view(-1, cache.shape[2], width).index_select(0, span.gather).view(-1, width)[span.keys]
    rotated = held[None, :, latent:].expand(heads, -1, -1)
    keys = torch.cat((held[:, :latent] @ key_weight.transpose(1, 2), rotated), dim=-1)
    values = held[:, :latent] @ value_weight.transpose(1, 2)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=span.mask, is_causal=span.mask is None,
        scale=scale,
    )  # fmt: skip
    return attended[0].transpose(0, 1)
