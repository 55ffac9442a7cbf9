"""Traces through policies: how often what is asked for is there."""

import random
from heapq import heappop, heappush
from itertools import islice

from troupellm.actors.kv_offload.eviction import make_policy
from troupellm.load_tests.kv_cache.traces import TRACES

OPTIMUM = "optimum"


def replay(
    trace: str, *, accesses: int, capacity: int, policies: tuple[str, ...] = ("lru", "arc"), seed: int = 0
) -> dict[str, float]:
    """Hit rates by policy, and of the optimum, on one trace."""
    blocks = list(islice(TRACES[trace](random.Random(seed), capacity), accesses))
    rates = {name: _hits(name, blocks, capacity) / accesses for name in policies}
    rates[OPTIMUM] = optimal_hits(blocks, capacity) / accesses
    return rates


def _hits(policy: str, blocks: list[int], capacity: int) -> int:
    """As the host tier does it: what is there is touched, what is not is stored."""
    kept = make_policy(policy, capacity)
    hits = 0
    for block in blocks:
        key = block.to_bytes(8, "big")
        if key in kept:
            kept.touch(key)
            hits += 1
        else:
            kept.admit(key, _nothing_is_pinned)
    return hits


def optimal_hits(blocks: list[int], capacity: int) -> int:
    """The optimal policy evicts the block whose next use is last. (L. Belady, IBM Systems Journal 5:2, 1966: MIN.)"""
    never = len(blocks)
    next_use = [never] * never
    seen: dict[int, int] = {}
    for index in range(never - 1, -1, -1):
        next_use[index] = seen.get(blocks[index], never)
        seen[blocks[index]] = index
    kept: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    """(minus the next use, block); entries of earlier uses are out of date."""
    hits = 0
    for index, block in enumerate(blocks):
        if block in kept:
            hits += 1
        elif len(kept) >= capacity:
            while True:
                use, victim = heappop(order)
                if kept.get(victim) == -use:
                    del kept[victim]
                    break
        kept[block] = next_use[index]
        heappush(order, (-next_use[index], block))
    return hits


def _nothing_is_pinned(_: bytes) -> bool:
    return False
