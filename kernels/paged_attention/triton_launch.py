"""Launches the attention kernels for a device plan."""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import next_power_of_2
from troupellm.kernels.common.triton_language import LOG2_E
from troupellm.kernels.paged_attention.device_plan import (
    SMALLEST_PRODUCT,
    DecodePart,
    DevicePlan,
    ExtendPart,
    workspace,
)
from troupellm.kernels.paged_attention.triton_decode import decode_kernel, merge_kernel
from troupellm.kernels.paged_attention.triton_extend import extend_kernel
from troupellm.kernels.paged_attention.triton_latent import latent_kernel

MERGED_TOGETHER = 16
"""Pieces of a cut row that are loaded at once."""

Caches = tuple[Tensor, Tensor]


class _Call:
    """One layer's call: the arguments of both kernels."""

    def __init__(
        self,
        query: Tensor,
        caches: Caches,
        plan: DevicePlan,
        out: Tensor,
        *,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        self.query, self.out, self.plan, self.sinks = query, out, plan, sinks
        scales = tuple(cache.view(torch.float32) if cache.dtype == torch.int8 else None for cache in caches)
        self.caches = (*caches, *scales)
        # Scores are taken to powers of two; a soft cap needs them divided by the cap before and multiplied after.
        self.factors = (scale / softcap, softcap * LOG2_E.value) if softcap else (scale * LOG2_E.value, 1.0)
        self.strides = (query.stride(0), out.stride(0), caches[0].stride(0))
        shape = plan.shape
        self.head = {"GROUP": shape.group, "HEAD_DIM": shape.head_dim, "DIM": shape.padded_dim}
        self.window = {"WINDOW": shape.window or 0}
        self.cache = {"ROW": caches[0].shape[3], "PAGE": shape.block_size, "SOFT_CAP": softcap > 0}

    def decode(self, part: DecodePart) -> None:
        shape, programs = self.plan.shape, part.tasks.shape[0] - 1
        rows = shape.packed(part.queries)
        sums, stats = workspace(self.query.device, programs, rows, shape.padded_dim)
        packed = {"QUERIES": part.queries, "ROWS": rows}
        decode_kernel[(programs,)](
            self.query,
            *self.caches,
            self.sinks,
            part.block_tables,
            part.query_starts,
            part.context_lens,
            part.tasks,
            self.out,
            sums,
            stats,
            *self.strides,
            part.block_tables.stride(0),
            *self.factors,
            KV_HEADS=shape.num_kv_heads,
            **packed,
            **self.head,
            **self.cache,
            **self.window,
            **part.launch.options,
        )
        merge_kernel[(programs, part.queries * shape.group)](
            self.sinks,
            part.query_starts,
            part.context_lens,
            part.tasks,
            self.out,
            sums,
            stats,
            self.strides[1],
            programs,
            **packed,
            **self.head,
            **self.window,
            HEADS=shape.num_heads,
            OUT_ROW=shape.head_dim,
            TILE=part.launch.constants["TILE"],
            PIECES=MERGED_TOGETHER,
            num_warps=4,
        )

    def decode_latent(self, part: DecodePart) -> None:
        shape, programs = self.plan.shape, part.tasks.shape[0] - 1
        rows, dim = shape.packed(1), next_power_of_2(shape.latent)
        sums, stats = workspace(self.query.device, programs, rows, dim)
        rotated = shape.head_dim - shape.latent
        latent_kernel[(programs,)](
            self.query,
            self.caches[0],
            part.block_tables,
            part.query_starts,
            part.context_lens,
            part.tasks,
            self.out,
            sums,
            stats,
            *self.strides,
            part.block_tables.stride(0),
            self.factors[0],
            HEADS=shape.num_heads,
            KV_HEADS=shape.task_heads,
            GROUP=shape.group,
            ROWS=rows,
            LATENT=shape.latent,
            LATENT_DIM=dim,
            ROTATED=rotated,
            ROTATED_DIM=max(next_power_of_2(rotated), SMALLEST_PRODUCT),
            PAGE=shape.block_size,
            **part.launch.options,
        )
        merge_kernel[(programs, shape.group)](
            None,
            part.query_starts,
            part.context_lens,
            part.tasks,
            self.out,
            sums,
            stats,
            self.strides[1],
            programs,
            HEADS=shape.num_heads,
            OUT_ROW=shape.head_dim,
            GROUP=shape.group,
            QUERIES=1,
            ROWS=rows,
            HEAD_DIM=shape.latent,
            DIM=dim,
            WINDOW=0,
            TILE=part.launch.constants["TILE"],
            PIECES=MERGED_TOGETHER,
            num_warps=4,
        )

    def extend(self, part: ExtendPart) -> None:
        extend_kernel[(part.blocks.shape[0], self.plan.shape.num_kv_heads)](
            self.query,
            *self.caches,
            self.sinks,
            part.block_tables,
            part.query_starts,
            part.query_stops,
            part.context_lens,
            part.blocks,
            *part.tree,
            self.out,
            *self.strides,
            part.block_tables.stride(0),
            *self.factors,
            TOKENS=part.tokens,
            **self.head,
            **self.cache,
            **self.window,
            **part.launch.options,
        )


def run(
    query: Tensor,
    caches: Caches,
    plan: DevicePlan,
    scale: float,
    out: Tensor,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Compute all rows of a plan.

    Args:
        query: [tokens, heads, head_dim], heads contiguous.
        caches: keys and values [blocks, kv_heads, block_size, head_dim], contiguous within a block, of the type of
            `query` or one of those of `kernels.kv_quant` with rows of its width.
        out: [tokens, heads, head_dim], heads contiguous; tokens of rows are written, 0 where nothing is seen. Of a plan
            for latent vectors the first `latent` values of each head are written, the others mean nothing.
    """
    call = _Call(query, caches, plan, out, scale=scale, softcap=softcap, sinks=sinks)
    if plan.decode is not None and plan.shape.latent:
        call.decode_latent(plan.decode)
    elif plan.decode is not None:
        call.decode(plan.decode)
    if plan.extend is not None:
        call.extend(plan.extend)
