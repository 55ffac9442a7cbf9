"""Causal attention of a mixed batch (prefill chunks and decode rows) over a paged KV cache."""

import torch
from torch import Tensor

from troupellm.kernels.paged_attention import by_token, cpu, dense
from troupellm.kernels.paged_attention.backends import Planned
from troupellm.kernels.paged_attention.device_plan import DevicePlan
from troupellm.kernels.paged_attention.plan import AttentionPlan

Plan = AttentionPlan | DevicePlan | Planned
"""The keys of a step's rows; the plan's type selects the back end, see `backends`."""


def prepare() -> str:
    """Build what has to be built, off the request path.

    Returns:
        "compiled" or "torch": which path float32 takes on a CPU.
    """
    return "torch" if cpu.load() is None else "compiled"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the keys that the plan names. The step's own keys and values have been written before.

    Args:
        query: [tokens, heads, head_dim], each token's heads contiguous; heads is a multiple of kv_heads.
        key_cache: [blocks, kv_heads, block_size, head_dim], contiguous, the type of `query` or one of
            `kernels.kv_quant`.
        value_cache: like `key_cache`.
        scale: of the scores, before the softmax.
        softcap: after the scale, scores become softcap * tanh(score / softcap); 0 leaves them.
        sinks: float32 [heads], contiguous: one more score per head, of a key without a value; None is without.

    Returns:
        [tokens, heads, head_dim], contiguous, the type of `query`; 0 for tokens that the plan does not have.
    """
    if isinstance(plan, Planned):
        return plan.backend.attend(query, (key_cache, value_cache), plan.rows, scale, softcap, sinks)
    compiled = cpu.takes_compiled(plan) and cpu.supports(query, key_cache)
    function = cpu.load() if compiled else None
    if function is not None and isinstance(plan, AttentionPlan):
        heads, kv_heads, size = query.shape[1], key_cache.shape[1], query.shape[2]
        layer = cpu.CppAttention(function, heads, kv_heads, size, scale, softcap=softcap, sinks=sinks)
        return layer.attend(query, (key_cache, value_cache), plan)
    whole = query.shape[0] == plan.num_tokens
    out = (torch.empty if whole else torch.zeros)(query.shape, dtype=query.dtype, device=query.device)
    if isinstance(plan, DevicePlan):
        from troupellm.kernels.paged_attention import triton_launch

        triton_launch.run(query, (key_cache, value_cache), plan, scale, out, softcap=softcap, sinks=sinks)
        return out
    if plan.by_token:
        by_token.attend(query, key_cache, value_cache, plan, scale, softcap, sinks, out)
        return out
    for span in plan.prefills:
        out[span.tokens] = dense.prefill(query[span.tokens], key_cache, value_cache, span, scale, softcap, sinks)
    for bucket in plan.buckets if plan.items.shape[0] else ():
        out[bucket.tokens] = dense.decode(query[bucket.tokens], key_cache, value_cache, bucket, scale, softcap, sinks)
    return out
