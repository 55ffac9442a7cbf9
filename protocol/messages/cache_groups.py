"""How many blocks sequences need over all cache groups: for the worker's memory and for the scheduler's admission."""

from collections.abc import Sequence
from typing import Final

from troupellm.protocol.messages.worker import CacheGroup, WorkerReady

NO_LIMIT: Final = 1 << 40
"""Positions; stands for a sequence of any length."""


def windows_of(ready: WorkerReady) -> tuple[int | None, ...]:
    """Per group, which positions before a token its blocks are kept for; None is all."""
    return tuple(group.sliding_window for group in ready.groups)


def capacity_tokens(ready: WorkerReady, span: int) -> int:
    """How many positions one sequence may have that gets all of a worker's blocks, `span` of them per step at most."""
    return longest_sequence(windows_of(ready), ready.num_blocks, span, ready.block_size)


def group_name(index: int, group: CacheGroup) -> str:
    """How metrics call a group."""
    window = "" if group.sliding_window is None else f"-{group.sliding_window}"
    return f"{index}-{group.kind}{window}"


def window_blocks(window: int, span: int, block_size: int) -> int:
    """Most blocks that a group with a sliding window holds of one sequence that is computed `span` tokens at a time.

    The span and all that its first token sees, and one position more: who shares a prompt begins one token before its
    end. They may begin anywhere within a block.
    """
    return (window + span - 2) // block_size + 2


def count_blocks(windows: Sequence[int | None], num_positions: int, span: int, block_size: int) -> int:
    """Most blocks that one sequence of so many positions holds at once, in all groups together.

    Args:
        windows: per group; None keeps every position.
        span: tokens of one step, at most.
    """
    whole = -(-num_positions // block_size)
    span = min(span, num_positions)
    return sum(whole if window is None else min(whole, window_blocks(window, span, block_size)) for window in windows)


def longest_sequence(windows: Sequence[int | None], num_blocks: int, span: int, block_size: int) -> int:
    """Most positions of a sequence that gets all of the blocks; NO_LIMIT where windows bound what it needs."""
    low, high = 0, num_blocks * block_size
    if None not in windows and count_blocks(windows, NO_LIMIT, span, block_size) <= num_blocks:
        return NO_LIMIT
    while low < high:
        middle = (low + high + 1) // 2
        if count_blocks(windows, middle, span, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def count_beam_blocks(num_groups: int, num_prompt_tokens: int, num_positions: int, width: int, block_size: int) -> int:
    """The most blocks of a beam search: the prompt's full blocks once, and for each beam the blocks behind them.

    Beams keep what lies behind a window: a step may take any of them back to where they were one.
    """
    shared = num_prompt_tokens // block_size
    return num_groups * (shared + width * (-(-num_positions // block_size) - shared))
