"""Sharing a step's attention among programs, on the device: run once per step, read by every layer."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.paged_attention.triton_tiles import row_tiles

ROWS_TOGETHER = (64, 1024)
"""Looked at together: few where there are few, and no other numbers, each of which would be compiled by itself."""


@triton.jit(do_not_specialize=["context_lens", "rows"])
def decode_tasks_kernel(
    context_lens,
    tasks,
    rows,
    kv_heads,
    queries,
    window,
    programs,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the beginning of one program's run of tiles. Tiles are counted row by row, head by head."""
    program = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    all_tiles = tl.zeros([], tl.int64)
    for begin in range(0, rows, ROWS):
        inside = begin + offsets < rows
        first, last = row_tiles(tl.load(context_lens + begin + offsets, inside, 0), queries, window, TILE)
        all_tiles += tl.sum(tl.where(inside, last - first, 0))
    units = all_tiles * kv_heads
    sharing = tl.minimum(units, programs)
    unit = tl.where(program < sharing, program * units // tl.maximum(sharing, 1), units)
    row = tl.zeros([], tl.int32)
    before, counted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in range(0, rows, ROWS):
        inside = begin + offsets < rows
        first, last = row_tiles(tl.load(context_lens + begin + offsets, inside, 0), queries, window, TILE)
        tiles = tl.where(inside, last - first, 0)
        passed = inside & ((counted + tl.cumsum(tiles, 0)) * kv_heads <= unit)
        row += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles, 0))
        counted += tl.sum(tiles)
    first, last = row_tiles(tl.load(context_lens + row, row < rows, 0), queries, window, TILE)
    within = (unit - before * kv_heads).to(tl.int32)
    tl.store(tasks + program * 4, row)
    tl.store(tasks + program * 4 + 1, within // (last - first))
    tl.store(tasks + program * 4 + 2, first + within % (last - first))
    tl.store(tasks + program * 4 + 3, unit.to(tl.int32))


@triton.jit(do_not_specialize=["query_starts", "query_stops", "rows"])
def extend_blocks_kernel(
    query_starts,
    query_stops,
    blocks,
    rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the row, and its block of query tokens, that one program computes; row -1 is none."""
    program = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    row, before, counted = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, rows, ROWS):
        inside = begin + offsets < rows
        starts = tl.load(query_starts + begin + offsets, inside, 0)
        tokens = tl.load(query_stops + begin + offsets, inside, 0) - starts
        needed = (tokens + BLOCK - 1) // BLOCK
        passed = inside & (counted + tl.cumsum(needed, 0) <= program)
        row += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, needed, 0))
        counted += tl.sum(needed)
    tl.store(blocks + program * 2, tl.where(row < rows, row, -1))
    tl.store(blocks + program * 2 + 1, program - before)


def map_decode(context_lens: Tensor, tasks: Tensor, *, kv_heads: int, queries: int, window: int, tile: int) -> None:
    """Fill `tasks`.

    Args:
        context_lens: int32 [rows].
        tasks: int32 [programs + 1, 4]: row, KV head, tile, number of the tile among all; the last entry is the end.
        queries: query tokens of each row, the last ones of its context.
        window: keys that a token sees; 0 is all before it.
    """
    rows, entries = context_lens.shape[0], tasks.shape[0]
    decode_tasks_kernel[(entries,)](
        context_lens,
        tasks,
        rows,
        kv_heads,
        queries,
        window,
        entries - 1,
        TILE=tile,
        ROWS=_together(rows),
        num_warps=4,
    )


def map_extend(query_starts: Tensor, query_stops: Tensor, blocks: Tensor, *, block: int) -> None:
    """Fill `blocks`.

    Args:
        query_starts: int32 [rows]; query_stops: the same.
        blocks: int32 [programs, 2]: row or -1, block of `block` query tokens within the row.
    """
    rows = query_starts.shape[0]
    extend_blocks_kernel[(blocks.shape[0],)](
        query_starts, query_stops, blocks, rows, BLOCK=block, ROWS=_together(rows), num_warps=4
    )


def _together(rows: int) -> int:
    return next((size for size in ROWS_TOGETHER if rows <= size), ROWS_TOGETHER[-1])
