"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a paged cache of latent vectors.

The cache holds one vector per token. It consists of a latent vector, and of the rotated part of the key, which all
heads share. Each head's key and value are products of the latent vector with the head's own weights. There are two
orders to compute in:

- absorbed: the key's weights are multiplied into the query and the value's into the result. All heads then attend to
  the cache itself, as if it were one KV head. A token reads each vector once: right for decoding.
- expanded: keys and values of all heads are made for a row's whole context. Each head then works with its own small
  vectors, which is less work where many tokens of a row share what was made: right for long pieces of a prompt.
"""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.paged_attention import Plan, dense, paged_attention
from troupellm.kernels.paged_attention.device_plan import DevicePlan
from troupellm.kernels.paged_attention.plan import AttentionPlan

MOST_EXPANDED = 1 << 19
"""Keys that are made at once, of all heads together: some hundreds of MB with their values."""
MOST_MASKED = 1 << 26
"""Pairs of a token and a key that one mask is for."""


def mla_attention(
    query: Tensor,
    cache: Tensor,
    plan: Plan,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Attend to the keys that the plan names. The step's own vectors have been written before.

    Args:
        query: [tokens, heads, plain + rotated], contiguous; as many tokens as the plan has.
        cache: [blocks, 1, block_size, latent + rotated], contiguous, the type of `query` or one of `kernels.kv_quant`.
        plan: of one KV head of the cache's width, without a window. Expanded are the long rows of an `AttentionPlan`
            and of a `DevicePlan` that has them apart; any other plan is absorbed.
        key_weight: [heads, plain, latent].
        value_weight: [heads, value, latent].
        scale: of the scores, before the softmax.
        batch_invariant: each token's products are computed alone, so that they do not depend on the batch.

    Returns:
        [tokens, heads, value], contiguous, the type of `query`.
    """
    if isinstance(plan, DevicePlan) and plan.others is not None:
        return _with_long_rows(query, cache, plan, plan.others, key_weight, value_weight, scale)
    (_, plain, latent), value = key_weight.shape, value_weight.shape[1]
    apart = None
    if isinstance(plan, AttentionPlan) and not (batch_invariant or plan.by_token):
        apart = plan.apart(expanding_tokens(plain, value, latent, query.shape[2] - plain))
    if apart is None:
        return _absorbed(query, cache, plan, key_weight, value_weight, scale, batch_invariant=batch_invariant)
    out = query.new_empty(query.shape[0], *value_weight.shape[:2])
    for span in apart.spans:
        held = dense.gather(cache, span.gather, 1, query.dtype)[0, 0, span.keys]
        out[span.tokens] = _expanded(query[span.tokens], held, key_weight, value_weight, scale)
    if apart.rest is not None:
        out[apart.tokens] = _absorbed(query[apart.tokens], cache, apart.rest, key_weight, value_weight, scale)
    return out


def expanding_tokens(plain: int, value: int, latent: int, rotated: int) -> int:
    """From so many tokens of one row on, making its keys and values costs less than working with latent vectors.

    Per head and key, a token multiplies `latent + rotated` numbers for its score and `latent` for the value absorbed,
    `plain + rotated` and `value` expanded; to expand a key and its value takes `latent * (plain + value)`.
    """
    saved = (latent + rotated + latent) - (plain + rotated + value)
    return max(2, -(-latent * (plain + value) // saved)) if saved > 0 else 1 << 30


def _absorbed(
    query: Tensor,
    cache: Tensor,
    plan: Plan,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """As `mla_attention`, all rows in the first order."""
    parts = torch.split(query, 1) if batch_invariant else (query,)
    mixed = paged_attention(torch.cat([_absorb(part, key_weight) for part in parts]), cache, cache, plan, scale)
    return torch.cat([_values(part, value_weight) for part in torch.split(mixed, parts[0].shape[0])])


def _absorb(query: Tensor, key_weight: Tensor) -> Tensor:
    """[tokens, heads, latent + rotated]: queries that meet the cache as it is."""
    plain = key_weight.shape[1]
    return torch.cat((torch.einsum("thp,hpl->thl", query[..., :plain], key_weight), query[..., plain:]), dim=-1)


def _values(mixed: Tensor, value_weight: Tensor) -> Tensor:
    """[tokens, heads, value] from mixtures of the cached vectors, whose rotated parts mean nothing as values."""
    return torch.einsum("thl,hvl->thv", mixed[..., : value_weight.shape[2]], value_weight).contiguous()


def _with_long_rows(
    query: Tensor,
    cache: Tensor,
    plan: DevicePlan,
    others: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
) -> Tensor:
    out = query.new_empty(query.shape[0], *value_weight.shape[:2])
    for row in plan.long:
        held = dense.gather(cache, row.blocks, 1, query.dtype)[0, 0, : row.keys]
        out[row.tokens] = _expanded(query[row.tokens], held, key_weight, value_weight, scale)
    if plan.num_tokens:
        out.index_copy_(0, others.long(), _absorbed(query[others], cache, plan, key_weight, value_weight, scale))
    return out


def _expanded(query: Tensor, held: Tensor, key_weight: Tensor, value_weight: Tensor, scale: float) -> Tensor:
    """Attention of a row's last tokens [tokens, heads, plain + rotated], to [tokens, heads, value].

    Heads and tokens are taken a few at a time where the context is long, so that it fits into memory.

    Args:
        held: [keys, latent + rotated], all that is cached of the row.
    """
    (heads, _, latent), (tokens, keys) = key_weight.shape, (query.shape[0], held.shape[0])
    past = keys - tokens
    # 0 times a value that is not finite is not 0: it is never multiplied, and a query that sees it becomes NaN.
    bad = ~held.isfinite().all(dim=1)
    held = held.masked_fill(bad[:, None], 0)
    out = query.new_empty(tokens, heads, value_weight.shape[1])
    some_heads, some_tokens = max(1, MOST_EXPANDED // keys), max(1, MOST_MASKED // keys) if past else tokens
    for head in range(0, heads, some_heads):
        these = slice(head, head + some_heads)
        plain = held[:, :latent] @ key_weight[these].transpose(1, 2)
        made = torch.cat((plain, held[None, :, latent:].expand(plain.shape[0], -1, -1)), dim=-1)
        values = held[:, :latent] @ value_weight[these].transpose(1, 2)
        for first in range(0, tokens, some_tokens):
            own = query[first : first + some_tokens, these].transpose(0, 1)
            seen = past + first + own.shape[1]
            mask = own.new_ones(own.shape[1], seen, dtype=torch.bool).tril(past + first) if past else None
            attended = functional.scaled_dot_product_attention(
                own[None],
                made[None, :, :seen],
                values[None, :, :seen],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            out[first : first + some_tokens, these] = attended[0].transpose(0, 1)
    return out.masked_fill_((bad.cumsum(0)[past:] > 0)[:, None, None], float("nan"))
