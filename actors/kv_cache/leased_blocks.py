"""Blocks under a lease, which are evicted after all others: the oldest lease first.

A lease runs from the moment at which nothing uses the block any more, so every use renews it. Nothing is locked: a
block under a lease is given away as soon as no other block is left, and one whose lease has expired joins the others.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple


class _Lease(NamedTuple):
    owner: str
    seconds: float


class LeasedBlocks:
    """Knows which blocks are leased, to which owner, and in which order they go. The pool keeps the references."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds on the scheduler's clock."""
        self.fraction = 0.0
        """Share of the blocks that may be leased, by all owners together."""
        self.budget = 0
        """The same in blocks; 0: there are no leases."""
        self.cached: dict[int, float] = {}
        """Leased blocks that nothing uses, and when their leases end."""
        self.ends: Counter[str] = Counter()
        """Leases that have ended, in blocks, by reason."""
        self.num_clipped = 0
        """Blocks that got no lease, since their owner had as many as it may."""
        self.on_given_away: Callable[[int], None] | None = None
        """Hears of a cached block before other work gets it."""
        self._lease_of: dict[int, _Lease] = {}
        self._of_owner: dict[str, OrderedDict[int, None]] = {}
        """Leased blocks, the longest unused first."""
        self._queues: dict[float, OrderedDict[int, None]] = {}
        """Cached blocks by the seconds of their leases; of each queue the first block's lease ends first."""

    def __len__(self) -> int:
        return len(self._lease_of)

    def __contains__(self, block: int) -> bool:
        return block in self._lease_of

    def begin(self, num_blocks: int) -> None:
        """The blocks are new: none of them is leased."""
        self.budget = int(self.fraction * num_blocks)
        self.end_all("reset")

    def choose(self, owner: str, blocks: Sequence[int]) -> tuple[list[int], list[tuple[int, str]]]:
        """Which blocks of a prefix the owner may lease, and which leases must end for them, each with the reason.

        Owners have equal shares of the budget. An owner that has more than its share gives way to one that has less.
        Otherwise an owner's own oldest leases give way, and the rest of the prefix gets none.
        """
        fresh = [block for block in blocks if block not in self._lease_of]
        missing = len(fresh) - (self.budget - len(self._lease_of))
        if missing <= 0:
            return list(blocks), []
        ended: list[tuple[int, str]] = []
        own, wanted = self._of_owner.get(owner, OrderedDict()), set(blocks)
        share = self.budget // (len(self._of_owner) + (not own))
        deserved = min(missing, share - (len(own) + len(fresh) - missing))
        for other in sorted(self._of_owner, key=lambda name: -len(self._of_owner[name])) if deserved > 0 else ():
            excess = min(deserved, len(self._of_owner[other]) - share)
            if other != owner and excess > 0:
                taken = _first(self._of_owner[other], excess, wanted)
                ended += [(block, "share") for block in taken]
                deserved -= len(taken)
                missing -= len(taken)
        replaced = _first(own, missing, wanted)
        ended += [(block, "replaced") for block in replaced]
        missing -= len(replaced)
        self.num_clipped += missing
        clipped = set(fresh[len(fresh) - missing :])
        return [block for block in blocks if block not in clipped], ended

    def add(self, owner: str, block: int, seconds: float) -> None:
        """Lease a block to an owner; of two leases of a block the longer one holds. It counts as used."""
        before = self._lease_of.get(block)
        if before is not None:
            seconds = max(seconds, before.seconds)
            self._drop(block)
        self._lease_of[block] = _Lease(owner, seconds)
        self._of_owner.setdefault(owner, OrderedDict())[block] = None

    def rest(self, block: int) -> None:
        """Nothing uses a leased block any more: its lease runs from now."""
        owner, seconds = self._lease_of[block]
        self._of_owner[owner].move_to_end(block)
        self.cached[block] = self.now + seconds
        self._queues.setdefault(seconds, OrderedDict())[block] = None

    def use(self, block: int) -> None:
        """A cached block is in use again."""
        del self.cached[block]
        seconds = self._lease_of[block].seconds
        queue = self._queues[seconds]
        del queue[block]
        if not queue:
            del self._queues[seconds]

    def end(self, block: int, reason: str) -> None:
        """The lease of a block ends, cached or in use."""
        self._drop(block)
        self.ends[reason] += 1

    def oldest(self) -> int:
        """The cached block that goes first: one whose lease has run out, else that of the oldest lease."""
        heads = [(next(iter(queue)), seconds) for seconds, queue in self._queues.items()]
        return min(heads, key=lambda head: (self.cached[head[0]] > self.now, self.cached[head[0]] - head[1]))[0]

    def expired(self) -> list[int]:
        """Cached blocks whose leases have run out."""
        found = []
        for queue in self._queues.values():
            for block in queue:
                if self.cached[block] > self.now:
                    break
                found.append(block)
        return found

    def end_all(self, reason: str) -> None:
        self.ends[reason] += len(self._lease_of)
        self.cached.clear()
        self._lease_of.clear()
        self._of_owner.clear()
        self._queues.clear()

    def assert_invariants(self, references: Sequence[int]) -> None:
        """Args: of each block, how many tables hold it."""
        idle = {block for block in self._lease_of if not references[block]}
        assert idle == self.cached.keys(), "a leased block is filed wrongly"
        queued = [block for queue in self._queues.values() for block in queue]
        assert sorted(queued) == sorted(idle), "a cached block's lease never ends"
        owned = [block for blocks in self._of_owner.values() for block in blocks]
        assert sorted(owned) == sorted(self._lease_of), "a leased block has no owner"
        assert all(self._of_owner.values()), "an owner without leases counts for the shares"
        assert len(self._lease_of) <= self.budget, "more blocks are leased than may be"

    def _drop(self, block: int) -> None:
        if block in self.cached:
            self.use(block)
        owner = self._lease_of.pop(block).owner
        del self._of_owner[owner][block]
        if not self._of_owner[owner]:
            del self._of_owner[owner]


def _first(blocks: "OrderedDict[int, None]", count: int, kept: set[int]) -> list[int]:
    """The first `count` of the blocks, without those that are kept."""
    found: list[int] = []
    for block in blocks:
        if len(found) >= count:
            break
        if block not in kept:
            found.append(block)
    return found
