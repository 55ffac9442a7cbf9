"""Reference-counted KV blocks of one cache group.

Every block is in exactly one of three places:

    used     referenced by at least one owner (a sequence's block table)
    cached   referenced by nobody, but found again by its key until it is evicted, least recently used first
    free     neither

so `num_free + num_used + num_cached == num_blocks` always. Cached blocks are evicted when free ones run out, which is
why both count as available. Every operation is O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids are 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give right now."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each, content undefined. The caller has checked `num_available`."""
        if count > len(self._free) + len(self._cached):
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def find(self, key: bytes) -> int | None:
        """The block that holds the content named by `key`, used or cached."""
        return self._block_of.get(key)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, all of which are used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a table, given in table order.

        Goes from the tail, so the tail of a sequence is evicted before its head: a prefix is useful without its tail,
        never the other way round.
        """
        for block in reversed(blocks):
            references = self._references[block] = self._references[block] - 1
            if references < 0:
                raise ValueError(f"block {block} released more often than it was taken")
            if references == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def label(self, block: int, key: bytes) -> None:
        """Make a used, full block findable. Another block with the same content keeps the name if it has it."""
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def assert_invariants(self, owners: dict[int, int] | None = None) -> None:
        """Check the accounting; `owners` says how many tables hold each block (blocks left out: none)."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, references in enumerate(self._references) if references}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert not free & used, "a block is free and used"
        assert not cached & used, "a block is cached and used"
        assert len(free) + len(used) + len(cached) == self.num_blocks, "a block is lost"
        assert all(self._key_of[block] is None for block in free), "a free block has a key"
        assert all(self._key_of[block] is not None for block in cached), "a cached block has no key"
        named = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert named == self._block_of, "keys and blocks disagree"
        if owners is not None:
            counted = {block: self._references[block] for block in used}
            assert counted == owners, f"references {counted} differ from owners {owners}"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
        self._key_of[block] = None
        self.num_evictions += 1
        return block
