"""Attention of all heads to cached latent vectors (MLA, absorbed), shared out among programs as in `triton_decode`.

A cached row is a latent vector and a rotated part. The latent vector is key and value at once, so its tile is loaded
once for both products; many heads in one product make up for the width of the rows (DeepSeek-V2, arXiv 2405.04434).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import cast, dot
from troupellm.kernels.paged_attention.triton_tiles import NEVER, block_ids, row_tiles


@triton.jit
def attend_latent(
    query,
    turned,
    cache,
    table,
    begin,
    end,
    context,
    block_stride,
    scale,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Softmax over tiles [begin, end) of queries [ROWS, LATENT_DIM] and [ROWS, ROTATED_DIM]."""
    offsets, dims, others = tl.arange(0, TILE), tl.arange(0, LATENT_DIM), tl.arange(0, ROTATED_DIM)
    acc, total = tl.zeros([ROWS, LATENT_DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], NEVER, tl.float32)
    block = block_ids(table, begin, 0, context, PAGE, TILE)
    for tile in range(begin, end):
        position = tile * TILE + offsets
        there = block.to(tl.int64) * block_stride + (position % PAGE) * (LATENT + ROTATED) + tl.zeros([TILE], tl.int64)
        inside = position < context
        held = inside[:, None] & (dims[None, :] < LATENT)
        latent = tl.load(cache + there[:, None] + dims[None, :], mask=held, other=0.0)
        held_too = inside[None, :] & (others[:, None] < ROTATED)
        key = tl.load(cache + there[None, :] + LATENT + others[:, None], mask=held_too, other=0.0).to(query.dtype)
        block = block_ids(table, tile + 1, 0, context, PAGE, TILE)
        latent = latent.to(query.dtype)
        scores = dot(turned, key, tl.zeros([ROWS, TILE], tl.float32))
        scores = dot(query, tl.trans(latent), scores) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        maximum, total = higher, total * shrink + tl.sum(weights, 1)
        acc = dot(cast(weights, query.dtype), latent, acc * shrink[:, None])
    return acc, maximum, total


@triton.jit
def latent_kernel(
    query,
    cache,
    block_tables,
    query_starts,
    context_lens,
    tasks,
    out,
    part_sums,
    part_stats,
    query_stride,
    out_stride,
    block_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One query token per row. KV_HEADS counts blocks of GROUP heads, which all read the same cache."""
    WIDTH: tl.constexpr = LATENT + ROTATED
    program = tl.program_id(0)
    packed, dims, others = tl.arange(0, ROWS), tl.arange(0, LATENT_DIM), tl.arange(0, ROTATED_DIM)
    row, head = tl.load(tasks + program * 4), tl.load(tasks + program * 4 + 1)
    tile, unit = tl.load(tasks + program * 4 + 2), tl.load(tasks + program * 4 + 3)
    stop = tl.load(tasks + program * 4 + 7)
    while unit < stop:
        context = tl.load(context_lens + row)
        first, last = row_tiles(context, 1, 0, TILE)
        end = tl.minimum(last, tile + stop - unit)
        heads = head * GROUP + packed
        valid = (packed < GROUP) & (heads < HEADS)
        at = tl.load(query_starts + row).to(tl.int64)
        mine = query + at * query_stride + (heads * WIDTH)[:, None]
        q = tl.load(mine + dims[None, :], valid[:, None] & (dims[None, :] < LATENT), 0.0)
        turned = tl.load(mine + LATENT + others[None, :], valid[:, None] & (others[None, :] < ROTATED), 0.0)
        acc, maximum, total = attend_latent(
            q,
            turned,
            cache,
            block_tables + row.to(tl.int64) * table_stride,
            tile,
            end,
            context,
            block_stride,
            scale,
            ROWS,
            LATENT,
            LATENT_DIM,
            ROTATED,
            ROTATED_DIM,
            PAGE,
            TILE,
        )
        if (tile == first) & (end == last):
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            there = out + at * out_stride + (heads * WIDTH)[:, None] + dims[None, :]
            tl.store(there, cast(result, out.dtype.element_ty), valid[:, None] & (dims[None, :] < LATENT))
        else:
            slot = program * 2 + tl.where(tile == first, 1, 0)
            tl.store(part_sums + slot * (ROWS * LATENT_DIM) + packed[:, None] * LATENT_DIM + dims[None, :], acc)
            tl.store(part_stats + slot * (2 * ROWS) + packed, maximum)
            tl.store(part_stats + slot * (2 * ROWS) + ROWS + packed, total)
        unit += end - tile
        tile = 0
        head += 1
        row += head // KV_HEADS
        head = head % KV_HEADS
