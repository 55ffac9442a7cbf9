"""Causal attention of a mixed batch (prefill chunks and decode rows) over a paged KV cache."""

import torch
from torch import Tensor

from troupellm.kernels.paged_attention import dense, native
from troupellm.kernels.paged_attention.plan import AttentionPlan


def prepare() -> str:
    """Build what has to be built, off the request path.

    Returns:
        "compiled" or "torch": which path single query tokens will take in float32 on a CPU.
    """
    return "torch" if native.load() is None else "compiled"


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float, *, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to the keys that the plan names. The step's own keys and values have been written before.

    Args:
        query: [tokens, heads, head_dim], each token's heads contiguous; heads is a multiple of kv_heads.
        key_cache: [blocks, kv_heads, block_size, head_dim], contiguous, the type of `query` or one of
            `kernels.kv_codes`.
        value_cache: like `key_cache`.
        scale: of the scores, before the softmax.
        softcap: after the scale, scores become softcap * tanh(score / softcap); 0 leaves them.
        sinks: float32 [heads], contiguous: one more score per head, of a key without a value; None is without.

    Returns:
        [tokens, heads, head_dim], contiguous, the type of `query`; 0 for tokens that the plan does not have.
    """
    whole = query.shape[0] == plan.num_tokens
    out = (torch.empty if whole else torch.zeros)(query.shape, dtype=query.dtype, device=query.device)
    for span in plan.prefills:
        out[span.tokens] = dense.prefill(query[span.tokens], key_cache, value_cache, span, scale, softcap, sinks)
    if plan.items.shape[0] == 0:
        return out
    compiled = native.load() if native.supports(query) and key_cache.dtype == query.dtype else None
    if compiled is not None:
        caches, items = (key_cache, value_cache), (plan.block_tables, plan.items)
        native.run(compiled, query, caches, items, scale, out, softcap=softcap, sinks=sinks)
        return out
    for bucket in plan.buckets:
        out[bucket.tokens] = dense.decode(query[bucket.tokens], key_cache, value_cache, bucket, scale, softcap, sinks)
    return out
