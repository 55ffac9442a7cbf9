"""Paged attention of rows with one or a few query tokens: as many programs as the device holds, with equal shares.

Stream-K over the tiles of all rows and KV heads: each program takes an equal run of them. Skewed and short batches
therefore keep all multiprocessors busy. The grid does not depend on lengths, so it can be part of a CUDA graph. Only
the first and the last row of a run can be cut: their unnormalised sums go to the workspace and are merged afterwards.
(Osama et al., "Stream-K", 2023; Dao et al., "Flash-Decoding", 2023.)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import LOG2_E, cast
from troupellm.kernels.paged_attention.triton_tiles import NEVER, attend, finish, row_tiles


@triton.jit(do_not_specialize=["block_tables", "query_starts", "context_lens"])
def decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
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
    pre_scale,
    post_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    program = tl.program_id(0)
    packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, valid = packed // GROUP, packed < QUERIES * GROUP
    kept = valid[:, None] & (dims[None, :] < HEAD_DIM)
    row, head = tl.load(tasks + program * 4), tl.load(tasks + program * 4 + 1)
    tile, unit = tl.load(tasks + program * 4 + 2), tl.load(tasks + program * 4 + 3)
    stop = tl.load(tasks + program * 4 + 7)
    while unit < stop:
        context = tl.load(context_lens + row)
        first, last = row_tiles(context, QUERIES, WINDOW, TILE)
        tile = tl.maximum(tile, first)
        end = tl.minimum(last, tile + stop - unit)
        heads = head * GROUP + packed % GROUP
        at = (tl.load(query_starts + row) + token).to(tl.int64)
        q = tl.load(query + at[:, None] * query_stride + (heads * HEAD_DIM)[:, None] + dims[None, :], kept, 0.0)
        within = head * (PAGE * ROW)
        acc, maximum, total = attend(
            q,
            tl.zeros([ROWS, DIM], tl.float32),
            tl.full([ROWS], NEVER, tl.float32),
            tl.zeros([ROWS], tl.float32),
            keys + within,
            values + within,
            None if key_scales is None else key_scales + within // 4,
            None if value_scales is None else value_scales + within // 4,
            block_tables + row.to(tl.int64) * table_stride,
            tile,
            end,
            tl.maximum(context - QUERIES + 1 - WINDOW, 0) if WINDOW > 0 else 0,
            context,
            context - QUERIES + 1 + token,
            None,
            None,
            None,
            block_stride,
            pre_scale,
            post_scale,
            ROW=ROW,
            HEAD_DIM=HEAD_DIM,
            DIM=DIM,
            PAGE=PAGE,
            TILE=TILE,
            WINDOW=WINDOW,
            SOFT_CAP=SOFT_CAP,
            MASKED=True,
            GUARDED=QUERIES > 1,
        )
        if (tile == first) & (end == last):
            result = finish(acc, maximum, total, sinks, heads, valid)
            there = out + at[:, None] * out_stride + (heads * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(there, cast(result, out.dtype.element_ty), kept)
        else:
            slot = program * 2 + tl.where(tile == first, 1, 0)
            tl.store(part_sums + slot * (ROWS * DIM) + packed[:, None] * DIM + dims[None, :], acc)
            tl.store(part_stats + slot * (2 * ROWS) + packed, maximum)
            tl.store(part_stats + slot * (2 * ROWS) + ROWS + packed, total)
        unit += end - tile
        tile = 0
        head += 1
        row += head // KV_HEADS
        head = head % KV_HEADS


@triton.jit(do_not_specialize=["query_starts", "context_lens"])
def merge_kernel(
    sinks,
    query_starts,
    context_lens,
    tasks,
    out,
    part_sums,
    part_stats,
    out_stride,
    programs,
    HEADS: tl.constexpr,
    OUT_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Put together what begins in one program's run and goes on in the next one's: one query token and head.

    OUT_ROW is how far apart heads lie in `out`.
    """
    program, packed = tl.program_id(0), tl.program_id(1)
    row, head = tl.load(tasks + program * 4 + 4), tl.load(tasks + program * 4 + 5)
    tile, unit = tl.load(tasks + program * 4 + 6), tl.load(tasks + program * 4 + 7)
    units = tl.load(tasks + programs * 4 + 3).to(tl.int64)
    if unit < units:
        first, last = row_tiles(tl.load(context_lens + row), QUERIES, WINDOW, TILE)
        begin = unit - (tile - first)
        at_head = head * GROUP + packed % GROUP
        if (tile > first) & (begin >= tl.load(tasks + program * 4 + 3)) & (at_head < HEADS):
            sharing = tl.minimum(units, programs)
            final = ((begin + last - first).to(tl.int64) * sharing - 1) // units
            pieces = (final - program + 1).to(tl.int32)
            dims, offsets = tl.arange(0, DIM), tl.arange(0, PIECES)
            maximum, total = tl.full([], NEVER, tl.float32), tl.zeros([], tl.float32)
            acc = tl.zeros([DIM], tl.float32)
            for piece in range(0, pieces, PIECES):
                inside = piece + offsets < pieces
                slot = (program + piece + offsets) * 2 + tl.where(piece + offsets == 0, 1, 0)
                maxima = tl.load(part_stats + slot * (2 * ROWS) + packed, inside, NEVER)
                totals = tl.load(part_stats + slot * (2 * ROWS) + ROWS + packed, inside, 0.0)
                there = slot[:, None] * (ROWS * DIM) + packed * DIM + dims[None, :]
                sums = tl.load(part_sums + there, inside[:, None], 0.0)
                higher = tl.maximum(maximum, tl.max(maxima, 0))
                shares, shrink = tl.exp2(maxima - higher), tl.exp2(maximum - higher)
                acc = acc * shrink + tl.sum(sums * shares[:, None], 0)
                total = total * shrink + tl.sum(totals * shares, 0)
                maximum = higher
            if sinks is not None:
                total += tl.exp2(tl.load(sinks + at_head) * LOG2_E - maximum)
            at = (tl.load(query_starts + row) + packed // GROUP).to(tl.int64)
            result = cast(acc / tl.where(total == 0.0, 1.0, total), out.dtype.element_ty)
            tl.store(out + at * out_stride + at_head * OUT_ROW + dims, result, dims < HEAD_DIM)
