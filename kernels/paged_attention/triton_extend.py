"""Paged attention of rows with many query tokens (prefill, and chunks of it behind cached keys).

One program takes a block of query tokens with all heads of one KV head's group. Tiles that all of its tokens see whole
are computed without masks first, then those on the diagonal (and, under a window, those at its far edge) with them.
Every token meets its tiles in the same order however a prompt is cut into chunks. (Dao, "FlashAttention-2", 2023.)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import cast
from troupellm.kernels.paged_attention.triton_tiles import NEVER, attend, finish

FARTHEST = tl.constexpr(1 << 30)
"""A position behind all others."""
OF_SOME_ROWS = ("block_tables", "query_starts", "query_stops", "context_lens", "tree_bases", "tree_nodes")
"""Begin in the middle of a tensor, at any address, as the rows behind those that another kernel takes."""


@triton.jit(do_not_specialize=OF_SOME_ROWS)
def extend_kernel(
    query, keys, values, key_scales, value_scales, sinks, block_tables, query_starts, query_stops, context_lens,
    blocks, tree_bases, tree_nodes, tree_positions, out, query_stride, out_stride, block_stride, table_stride,
    pre_scale, post_scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    ROW: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    # The last blocks of a prompt have the most keys: they begin first, so that no long one is left for the end.
    program, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, index = tl.load(blocks + program * 2), tl.load(blocks + program * 2 + 1)
    if row >= 0:
        context = tl.load(context_lens + row)
        start, stop = tl.load(query_starts + row), tl.load(query_stops + row)
        packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        token, heads = index * TOKENS + packed // GROUP, head * GROUP + packed % GROUP
        valid = (packed < TOKENS * GROUP) & (start + token < stop)
        kept = valid[:, None] & (dims[None, :] < HEAD_DIM)
        at = (start + token).to(tl.int64)
        q = tl.load(query + at[:, None] * query_stride + (heads * HEAD_DIM)[:, None] + dims[None, :], kept, 0.0)
        past = context - (stop - start)  # the position of the row's first query token
        limits = past + token + 1
        lowest, highest = past + index * TOKENS + 1, tl.minimum(past + (index + 1) * TOKENS, context)
        end = (highest + TILE - 1) // TILE
        base = None if tree_bases is None else tl.load(tree_bases + row)
        nodes = None if tree_bases is None else tl.load(tree_nodes + at, valid, 0)
        floors = None if tree_bases is None else tl.load(tree_positions + at, valid, FARTHEST) + 1 - WINDOW
        whole_end = (lowest if tree_bases is None else tl.minimum(lowest, base)) // TILE
        oldest, begin, whole_begin = 0, 0, 0
        if WINDOW > 0:
            oldest = tl.maximum(lowest - WINDOW if tree_bases is None else tl.min(floors, 0), 0)
            begin = oldest // TILE
            whole_begin = (tl.maximum(highest - WINDOW, 0) + TILE - 1) // TILE
            whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
        whole_end = tl.maximum(whole_end, whole_begin)
        within = head * (PAGE * ROW)
        key_head, value_head = keys + within, values + within
        key_scale = None if key_scales is None else key_scales + within // 4
        value_scale = None if value_scales is None else value_scales + within // 4
        table = block_tables + row.to(tl.int64) * table_stride
        acc, total = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS], tl.float32)
        maximum = tl.full([ROWS], NEVER, tl.float32)
        if WINDOW > 0:
            acc, maximum, total = attend(
                q, acc, maximum, total, key_head, value_head, key_scale, value_scale, table, begin, whole_begin,
                oldest, context, limits, floors, base, nodes, block_stride, pre_scale, post_scale,
                ROW, HEAD_DIM, DIM, PAGE, TILE, WINDOW, SOFT_CAP, True, True,
            )  # fmt: skip
        acc, maximum, total = attend(
            q, acc, maximum, total, key_head, value_head, key_scale, value_scale, table, whole_begin, whole_end,
            oldest, context, limits, floors, base, nodes, block_stride, pre_scale, post_scale,
            ROW, HEAD_DIM, DIM, PAGE, TILE, WINDOW, SOFT_CAP, False, False,
        )  # fmt: skip
        acc, maximum, total = attend(
            q, acc, maximum, total, key_head, value_head, key_scale, value_scale, table, whole_end, end,
            oldest, context, limits, floors, base, nodes, block_stride, pre_scale, post_scale,
            ROW, HEAD_DIM, DIM, PAGE, TILE, WINDOW, SOFT_CAP, True, True,
        )  # fmt: skip
        result = finish(acc, maximum, total, sinks, heads, valid)
        there = out + at[:, None] * out_stride + (heads * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(there, cast(result, out.dtype.element_ty), kept)
