"""Traces of blocks that are asked for, made from a seed. A block is a number; each trace is about a tier's capacity."""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice

Trace = Iterator[int]

_NEW = 1 << 40
"""Blocks from this number on are asked for once."""


def scan_polluted(source: random.Random, capacity: int) -> Trace:
    """A hot set of 0.7 of the tier, and at times a stretch of 1.5 tiers of blocks that never come again: agents
    that read whole repositories beside everybody's system prompts."""
    hot = _zipf(source, int(0.7 * capacity), 0.6)
    fresh = count(_NEW)
    while True:
        yield from islice(hot, 3 * capacity)
        yield from islice(fresh, int(1.5 * capacity))


def recency(source: random.Random, capacity: int) -> Trace:
    """Conversations of a population four times as large as the tier: what was asked for a moment ago is likeliest to be
    asked for again. Depths in the stack of last uses are exponentially distributed, with a mean of half a tier, and one
    block in a hundred is new. (The faster new ones push old ones out for good, the further arc falls behind lru: at one
    in ten it is 5 %.)"""
    stack: list[int] = list(range(4 * capacity))
    fresh = count(len(stack))
    while True:
        depth = int(source.expovariate(2.0 / capacity))
        if source.random() < 0.01 or depth >= len(stack):
            block = next(fresh)
            stack.pop(0)
        else:
            block = stack.pop(-1 - depth)
        stack.append(block)
        yield block


def mixed(source: random.Random, capacity: int) -> Trace:
    """Popular prefixes of very different popularity, in a set of eight tiers that drifts, and short scans between."""
    fresh = count(_NEW)
    popular = _zipf(source, 8 * capacity, 0.9)
    shift = 0
    while True:
        for block in islice(popular, capacity):
            yield block + shift
        shift += capacity // 8
        yield from islice(fresh, capacity // 4)


def looping(source: random.Random, capacity: int) -> Trace:
    """The same blocks again and again, a fifth more than the tier holds: where least recently used is wrong always."""
    blocks = list(range(int(1.2 * capacity)))
    source.shuffle(blocks)
    while True:
        yield from blocks


TRACES: dict[str, Callable[[random.Random, int], Trace]] = {
    "scan": scan_polluted,
    "recency": recency,
    "mixed": mixed,
    "looping": looping,
}


def _zipf(source: random.Random, size: int, exponent: float) -> Trace:
    """Blocks 0 to size - 1, the nth with a likelihood in proportion to n ** -exponent."""
    ends = list(accumulate((rank + 1) ** -exponent for rank in range(size)))
    while True:
        yield bisect_left(ends, source.random() * ends[-1])
