"""Launching the attention kernels on what a device plan says."""

from torch import Tensor

from troupellm.kernels.paged_attention.device_plan import DecodePart, DevicePlan, ExtendPart, workspace
from troupellm.kernels.paged_attention.triton_decode import decode_kernel, merge_kernel
from troupellm.kernels.paged_attention.triton_extend import extend_kernel
from troupellm.kernels.triton_support.language import LOG2_E

MERGED_TOGETHER = 16
"""Pieces of a cut row that are loaded at once."""

Caches = tuple[Tensor, Tensor]
Scales = tuple[Tensor, Tensor] | None


class _Call:
    """One layer's call: what both kernels are given."""

    def __init__(self, query: Tensor, caches: Caches, scales: Scales, plan: DevicePlan, out: Tensor, *,
                 scale: float, softcap: float, sinks: Tensor | None) -> None:  # fmt: skip
        self.query, self.out, self.plan, self.sinks = query, out, plan, sinks
        self.caches = (*caches, *(scales or (None, None)))
        # Scores are taken to powers of two; a soft cap needs them divided by the cap before and multiplied after.
        self.factors = (scale / softcap, softcap * LOG2_E.value) if softcap else (scale * LOG2_E.value, 1.0)
        self.soft_cap = softcap > 0

    @property
    def shapes(self) -> dict[str, int | bool]:
        shape = self.plan.shape
        return {
            "KV_HEADS": shape.num_kv_heads,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "DIM": shape.padded_dim,
            "WINDOW": shape.window or 0,
        }

    def decode(self, part: DecodePart) -> None:
        shape, programs = self.plan.shape, part.tasks.shape[0] - 1
        rows = shape.packed(part.queries)
        sums, stats = workspace(self.query.device, programs, rows, shape.padded_dim)
        common = {**self.shapes, "QUERIES": part.queries, "ROWS": rows}
        decode_kernel[(programs,)](
            self.query, *self.caches, self.sinks, part.block_tables, part.query_starts, part.context_lens, part.tasks,
            self.out, sums, stats, self.query.stride(0), self.out.stride(0), self.caches[0].stride(0),
            part.block_tables.stride(0), *self.factors, **common, **part.launch.options,
            PAGE=shape.block_size, SOFT_CAP=self.soft_cap,
        )  # fmt: skip
        merge_kernel[(programs, part.queries * shape.group)](
            self.sinks, part.query_starts, part.context_lens, part.tasks, self.out, sums, stats, self.out.stride(0),
            programs, **common, TILE=part.launch.constants["TILE"], PIECES=MERGED_TOGETHER, num_warps=4,
        )  # fmt: skip

    def extend(self, part: ExtendPart) -> None:
        shape = self.plan.shape
        extend_kernel[(part.blocks.shape[0], shape.num_kv_heads)](
            self.query, *self.caches, self.sinks, part.block_tables, part.query_starts, part.query_stops,
            part.context_lens, part.blocks, self.out, self.query.stride(0), self.out.stride(0),
            self.caches[0].stride(0), part.block_tables.stride(0), *self.factors, **self.shapes,
            **part.launch.options, TOKENS=part.tokens, PAGE=shape.block_size, SOFT_CAP=self.soft_cap,
        )  # fmt: skip


def run(query: Tensor, caches: Caches, plan: DevicePlan, scale: float, out: Tensor, *, softcap: float = 0.0,
        sinks: Tensor | None = None, scales: Scales = None) -> None:  # fmt: skip
    """Compute all rows of a plan.

    Args:
        query: [tokens, heads, head_dim], heads contiguous.
        caches: keys and values [blocks, kv_heads, block_size, head_dim], contiguous within a block.
        out: [tokens, heads, head_dim], heads contiguous; tokens of rows are written, 0 where nothing is seen.
        scales: of keys and values, float32 [blocks, kv_heads, block_size], contiguous, for a cache in 8 bits.
    """
    call = _Call(query, caches, scales, plan, out, scale=scale, softcap=softcap, sinks=sinks)
    if plan.decode is not None:
        call.decode(plan.decode)
    if plan.extend is not None:
        call.extend(plan.extend)
