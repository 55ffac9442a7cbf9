"""Each query token by itself with torch's operators: slow, but equal to the bit in any batch."""

import torch
from torch import Tensor

from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.paged_attention.tree import TreeMask


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the attention of a plan's tokens to `out`; arguments as those of `paged_attention`.

    One call of the reference per token, since the operators order their sums by the shapes that they are given.
    """
    for item in torch.split(plan.items, 1):
        token = int(item[0, 0])
        alone = item.clone()
        alone[0, 0] = 0
        tree = plan.tree
        if tree is not None:
            tree = TreeMask(tree.bases, tree.seen[token : token + 1], tree.positions[token : token + 1])
        found = paged_attention_reference(
            query[token : token + 1],
            key_cache,
            value_cache,
            plan.block_tables,
            alone,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            tree=tree,
        )
        out[token] = found[0]
