"""The beginning of a decode step on a GPU, in one launch: a program for each row and cache group."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.decode_io.spec import Beginning

BEGIN = Launch(warps=4, stages=1, constants={"BLOCK": 1024})


@triton.jit
def copied(source, target, count, BLOCK: tl.constexpr):
    """The first numbers."""
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        inside = begin + lanes < count
        tl.store(target + begin + lanes, tl.load(source + begin + lanes, inside), inside)


@triton.jit(
    do_not_specialize=["length", "slots_of", "width", "scratch"],
    do_not_specialize_on_alignment=["slots", "ends", "counts"],
)
def begin_kernel(
    slots,
    ends,
    counts,
    texts,
    block_tables,
    angle_table,
    token_ids,
    positions,
    angles,
    starts,
    context_lens,
    tables,
    kv_rows,
    length,
    slots_of,
    width,
    scratch,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    ANGLES: tl.constexpr,
    ANGLES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row in one group; the first group's programs also write the results without groups.

    Args:
        slots_of: slots of each group in `block_tables`.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    rows = tl.num_programs(0)
    slot, end = tl.load(slots + row), tl.load(ends + row)
    of_group = block_tables + group.to(tl.int64) * slots_of * width
    needed = (end + PAGE - 1) // PAGE
    copied(of_group + slot * width, tables + (group.to(tl.int64) * rows + row) * width, needed, BLOCK)
    if group == 0:
        tl.store(context_lens + row, end.to(tl.int32))
        tl.store(starts + row, row * QUERIES)
        if row == rows - 1:
            tl.store(starts + rows, rows * QUERIES)
    heads = tl.arange(0, HEADS_BLOCK)
    for query in range(QUERIES):
        token = (row * QUERIES + query).to(tl.int64)
        own = slot
        if counts is not None:
            own = tl.where(query >= QUERIES - tl.load(counts + row), slot, scratch)
        position = tl.maximum(end - QUERIES + query, 0)
        block = tl.load(of_group + own * width + position // PAGE).to(tl.int64)
        to = (block * KV_HEADS + heads) * PAGE + position % PAGE
        first = (group.to(tl.int64) * rows * QUERIES + token) * KV_HEADS
        tl.store(kv_rows + first + heads, to, heads < KV_HEADS)
        if group == 0:
            tl.store(positions + token, position)
            tl.store(token_ids + token, tl.load(texts + own * length + position).to(tl.int64))
            if ANGLES > 0:
                copied(angle_table + position * ANGLES, angles + token * ANGLES, ANGLES, ANGLES_BLOCK)


def begin_triton(
    slots: Tensor,
    ends: Tensor,
    counts: Tensor | None,
    texts: Tensor,
    block_tables: Tensor,
    angle_table: Tensor | None,
    *,
    queries: int,
    block_size: int,
    kv_heads: int,
    scratch: int,
) -> Beginning:
    """As `begin`."""
    rows, device, tokens = slots.shape[0], texts.device, slots.shape[0] * queries
    groups, slots_of, width = block_tables.shape
    size = 0 if angle_table is None else angle_table.shape[1]
    angles = None if angle_table is None else torch.empty(tokens, size, dtype=angle_table.dtype, device=device)
    made = Beginning(
        token_ids=torch.empty(tokens, dtype=torch.int64, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        angles=angles,
        starts=torch.empty(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.empty(rows, dtype=torch.int32, device=device),
        tables=torch.empty(groups, rows, width, dtype=torch.int32, device=device),
        kv_rows=torch.empty(groups, tokens * kv_heads, dtype=torch.int64, device=device),
    )
    if rows:
        begin_kernel[(rows, groups)](
            slots,
            ends,
            counts,
            texts,
            block_tables,
            angle_table,
            *made,
            texts.shape[1],
            slots_of,
            width,
            scratch,
            QUERIES=queries,
            PAGE=block_size,
            KV_HEADS=kv_heads,
            HEADS_BLOCK=next_power_of_2(kv_heads),
            ANGLES=size,
            ANGLES_BLOCK=next_power_of_2(max(size, 1)),
            **BEGIN.options,
        )
    return made
