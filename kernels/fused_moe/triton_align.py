"""Assignments of tokens to experts, sorted by expert into whole blocks, without a host synchronisation.

Counting and placing happen in one launch: each expert's program counts all experts (a histogram over ids that lie in
the L2 cache), so it knows where its own blocks begin. Nothing is atomic: the order of slots is that of the tokens.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Blocks(NamedTuple):
    """Work for the products: blocks of slots that share an expert.

    A slot is a place in the flat `ids` [tokens * top_k]: token slot // top_k, its choice slot % top_k.
    """

    slots: Tensor
    """int32 [most_blocks * block_m]; blocks are padded with tokens * top_k."""
    experts: Tensor
    """int32 [most_blocks]; places from `total` on are undefined."""
    total: Tensor
    """int32 [1]: how many blocks there are."""


CHUNKS = (128, 1024)
"""Slots that are looked at together: few where there are few, and no other numbers, each of which would be compiled by
itself."""


@triton.jit(do_not_specialize=["num_slots"])
def align_kernel(
    ids_ptr,
    slots_ptr,
    block_experts_ptr,
    count_ptr,
    num_slots,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One expert's slots and blocks."""
    expert = tl.program_id(0)
    bins, lanes = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, num_slots, CHUNK):
        there = begin + lanes < num_slots
        ids = tl.load(ids_ptr + begin + lanes, mask=there, other=0)
        counts += tl.histogram(ids, BLOCK_E)
        counts -= tl.where(bins == 0, tl.sum((begin + lanes >= num_slots).to(tl.int32), axis=0), 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(count_ptr, tl.sum(blocks, axis=0))

    for begin in range(0, own, CHUNK):
        tl.store(block_experts_ptr + first + begin + lanes, expert, mask=begin + lanes < own)
    target = slots_ptr + first * BLOCK_M
    placed = tl.zeros([], tl.int32)
    for begin in range(0, num_slots, CHUNK):
        slots = begin + lanes
        mine = (tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1) == expert).to(tl.int32)
        tl.store(target + placed + tl.cumsum(mine, axis=0) - 1, slots, mask=mine == 1)
        placed += tl.sum(mine, axis=0)
    rest = tl.arange(0, BLOCK_M)
    tl.store(target + placed + rest, num_slots, mask=placed + rest < own * BLOCK_M)


def most_blocks(num_slots: int, experts: int, block_m: int) -> int:
    """The largest number of blocks that this many slots can make: every used expert may end in a block of one."""
    used = min(num_slots, experts)
    return used + (num_slots - used) // block_m


def align(ids: Tensor, experts: int, block_m: int) -> Blocks:
    """Sort assignments by expert.

    Args:
        ids: int32 [tokens, top_k], each below `experts`.
        block_m: slots in a block, a power of two.
    """
    num_slots, device = ids.numel(), ids.device
    most = most_blocks(num_slots, experts, block_m)
    blocks = Blocks(
        slots=torch.empty(most * block_m, dtype=torch.int32, device=device),
        experts=torch.empty(most, dtype=torch.int32, device=device),
        total=torch.empty(1, dtype=torch.int32, device=device),
    )
    chunk = CHUNKS[0] if num_slots <= CHUNKS[0] else CHUNKS[1]
    align_kernel[(experts,)](
        ids,
        *blocks,
        num_slots,
        experts,
        BLOCK_M=block_m,
        BLOCK_E=triton.next_power_of_2(experts),
        CHUNK=chunk,
        num_warps=4,
    )
    return blocks
