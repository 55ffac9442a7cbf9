"""Reference-counted KV blocks: one pool for all cache groups.

A block has the same size in every group, so each block serves the group that needs one next. Its contents are found
under its group's name alone. Every block is in exactly one of three places:

    used     referenced by at least one owner (a sequence's block table)
    cached   without references, but found again by its contents until it is evicted: least recently used first,
             leased blocks last
    free     neither

so `num_free + num_used + num_cached == num_blocks` always. Cached blocks are evicted when free ones run out, which is
why both count as available.

A full block is found by its key. Its tokens stand beside the key of the prefix before them, full or not, so that a
sequence which goes another way inside the block can still copy its first positions.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from troupellm.actors.kv_cache.block_hash import KEY_BYTES
from troupellm.actors.kv_cache.events import BlockEvents
from troupellm.actors.kv_cache.leased_blocks import LeasedBlocks
from troupellm.actors.kv_cache.partial_blocks import Branches
from troupellm.protocol.messages.cache_groups import group_name
from troupellm.protocol.messages.snapshot import CacheGroupSnapshot
from troupellm.protocol.messages.worker import CacheGroup

_TOUCHED_AT_ONCE = 1024


class BlockPool:
    """Block ids are 0 .. num_blocks - 1."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        events: BlockEvents | None = None,
        leased: LeasedBlocks | None = None,
    ) -> None:
        """
        Args:
            events: hears what can be found, and what cannot any more.
            leased: knows the blocks that are evicted last.
        """
        self.num_blocks = num_blocks
        self.leased = LeasedBlocks() if leased is None else leased
        self.leased.begin(num_blocks)
        self._events = events
        self._free: list[int] = []
        """Those that were used before, and some that were not: a large pool takes no time to make."""
        self._num_touched = 0
        """Blocks from this one on are free and not in the list."""
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._branches = Branches(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._dropped: set[int] = set()
        """Used blocks that are evicted before all others once they are released."""
        self._group_of = [0] * num_blocks
        """For which group a block was taken last."""
        self.used_by = [0] * num_groups
        """Used blocks per group."""
        self.cached_by = [0] * num_groups
        """Cached blocks per group."""
        self.num_evicted = 0
        """Cached blocks that were given away."""

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self.leased.cached)

    @property
    def num_unleased(self) -> int:
        """Blocks that `take` can give without ending a lease."""
        return self.num_free + len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give right now."""
        return self.num_free + len(self._cached) + len(self.leased.cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def group_of(self, block: int) -> int:
        """For which group a block was taken last."""
        return self._group_of[block]

    def key_of(self, block: int) -> bytes | None:
        """The key that a block is found by, group included."""
        return self._key_of[block]

    def take(self, count: int, group: int = 0) -> list[int]:
        """`count` blocks with one reference each, content undefined. The caller has checked `num_available`."""
        free, references, group_of = self._free, self._references, self._group_of
        if count == 1 and free:
            block = free.pop()
            references[block] = 1
            group_of[block] = group
            self.used_by[group] += 1
            return [block]
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        if len(free) < count:
            self._touch_free(count - len(free))
        while len(free) < count:
            free.insert(0, self._evict())
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in taken:
            references[block] = 1
            group_of[block] = group
        self.used_by[group] += count
        return taken

    def _touch_free(self, count: int) -> None:
        """Put so many blocks behind those in the list, or as many as there are."""
        begin = self._num_touched
        self._num_touched = end = min(self.num_blocks, begin + max(count, _TOUCHED_AT_ONCE))
        self._free[:0] = range(end - 1, begin - 1, -1)

    def find(self, key: bytes, group: int = 0) -> int | None:
        """The block that holds the content named by `key`, used or cached."""
        return self._block_of.get(in_group(key, group))

    def find_all(self, keys: Sequence[bytes], group: int = 0) -> list[int]:
        """The blocks of the first keys, as far as there are any without a gap."""
        find = self._block_of.get
        found = []
        for key in keys:
            block = find(in_group(key, group) if group else key)
            if block is None:
                break
            found.append(block)
        return found

    def count_unused(self, blocks: Sequence[int]) -> int:
        """The number of these blocks that have no reference."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def find_beginning(self, parent: bytes, tokens: bytes, group: int = 0) -> tuple[int, int] | None:
        """The block behind the prefix `parent` that begins with as many of `tokens` (int32) as possible, and how many.

        It may be in use and its further positions be written; its first ones stay what they are until it is evicted.
        """
        return self._branches.longest(in_group(parent, group), tokens)

    def touch(self, block: int) -> None:
        """A cached block was of use: others are evicted first."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def share(self, blocks: Iterable[int], group: int = 0) -> None:
        """Add one reference to each block, all of which are a group's, used or cached."""
        references, cached, leased = self._references, self._cached, self.leased.cached
        before = len(cached) + len(leased)
        for block in blocks:
            if references[block] == 0:
                if leased and block in leased:
                    self.leased.use(block)
                else:
                    del cached[block]
            references[block] += 1
        newly_used = before - len(cached) - len(leased)
        self.cached_by[group] -= newly_used
        self.used_by[group] += newly_used

    def release(self, blocks: Sequence[int], group: int = 0) -> None:
        """Drop one reference of each block of a group's table, given in table order.

        Goes from the tail, so the tail of a sequence is evicted before its head: a prefix is useful without its tail,
        never the other way round.
        """
        num_free, num_cached = len(self._free), self.num_cached
        leased = self.leased if len(self.leased) else ()
        for block in reversed(blocks):
            references = self._references[block] = self._references[block] - 1
            if references < 0:
                raise ValueError(f"block {block} released more often than it was taken")
            if references == 0:
                if self._key_of[block] is None and block not in self._branches:
                    self._free.append(block)
                elif block in leased:
                    self.leased.rest(block)
                else:
                    self._cached[block] = None
        if self._dropped:
            self._evict_released_first(blocks)
        newly_cached = self.num_cached - num_cached
        self.cached_by[group] += newly_cached
        self.used_by[group] -= newly_cached + len(self._free) - num_free

    def _evict_released_first(self, blocks: Sequence[int]) -> None:
        """Move those of a table's blocks that `evict_first` was called for while they were in use."""
        for block in blocks:
            if block in self._dropped and not self._references[block]:
                self._dropped.remove(block)
                if block in self._cached:
                    self._cached.move_to_end(block, last=False)

    def cache_block(self, block: int, key: bytes, parent: bytes = b"", tokens: bytes = b"", adapter: str = "") -> None:
        """Make a used, full block findable. Another block with the same content keeps the name if it has it.

        Args:
            parent: key of the prefix before the block.
            tokens: the block's own, int32; without them it is found as a whole only.
            adapter: name of the LoRA adapter that computed it, for events.
        """
        if self._key_of[block] is not None:
            return
        self._branches.remove(block)  # if it was known as not yet full
        group = self._group_of[block]
        chained, before = key, parent
        if group:
            key, parent = in_group(key, group), in_group(parent, group)
        if key in self._block_of:
            return
        self._block_of[key] = block
        self._key_of[block] = key
        if tokens:
            self._branches.add(parent, tokens, block)
        if self._events is not None:
            self._events.stored(chained, group, before, tokens, adapter)

    def cache_partial_block(self, block: int, parent: bytes, tokens: bytes) -> None:
        """Make the first positions of a used block findable; nothing happens where another block has the same."""
        if self._key_of[block] is not None:
            return
        parent = in_group(parent, self._group_of[block])
        known = self._branches.longest(parent, tokens)
        if known is not None and 4 * known[1] == len(tokens):
            return
        self._branches.remove(block)
        self._branches.add(parent, tokens, block)

    def forget(self, block: int) -> None:
        """Make a used block impossible to find."""
        self._unname(block)

    def lease(self, owner: str, blocks: Sequence[int], seconds: float) -> None:
        """Evict the blocks of a prefix after others, as far as the owner's share goes; see `LeasedBlocks`."""
        granted, ended = self.leased.choose(owner, blocks)
        for block, reason in ended:
            self.end_lease(block, reason)
        self._dropped.difference_update(granted)
        for block in reversed(granted):  # a prefix is useful without its tail
            self.leased.add(owner, block, seconds)
            if self._references[block] == 0:
                self._cached.pop(block, None)
                self.leased.rest(block)

    def end_lease(self, block: int, reason: str) -> None:
        """Let a leased block be evicted as others are."""
        cached = block in self.leased.cached
        self.leased.end(block, reason)
        if cached:
            self._cached[block] = None

    def show_groups(self, groups: Iterable[CacheGroup]) -> tuple[CacheGroupSnapshot, ...]:
        """How the blocks are shared among cache groups."""
        counted = zip(groups, self.used_by, self.cached_by, strict=True)
        return tuple(
            CacheGroupSnapshot(name=group_name(index, group), used=used, cached=cached)
            for index, (group, used, cached) in enumerate(counted)
        )

    def end_expired(self) -> None:
        """End the leases that have run out."""
        for block in self.leased.expired():
            self.end_lease(block, "expired")

    def evict_first(self, blocks: Sequence[int]) -> int:
        """End the leases of a prefix's blocks and evict them before all others, the tail before the head.

        Blocks in use follow when they are released.

        Returns:
            the number of blocks that are evicted next.
        """
        count = 0
        for block in blocks:
            if block in self.leased:
                self.end_lease(block, "deleted")
            if block in self._cached:
                self._cached.move_to_end(block, last=False)
                count += 1
            elif self._references[block]:  # of a sequence whose last step has not landed yet
                self._dropped.add(block)
                count += 1
        return count

    def forget_all(self) -> None:
        """Make every block impossible to find; cached blocks become free."""
        self._cached |= dict.fromkeys(self.leased.cached)
        self._dropped.clear()
        self.leased.end_all("reset")
        for block in self._cached:
            self._free.append(block)
        self._cached.clear()
        self.cached_by = [0] * len(self.cached_by)
        self._block_of.clear()
        self._branches.clear()
        self._key_of = [None] * self.num_blocks
        if self._events is not None:
            self._events.cleared()

    def assert_invariants(self, owners: dict[int, int] | None = None) -> None:
        """Check the accounting; `owners` says how many tables hold each block (blocks left out: none)."""
        untouched = range(self._num_touched, self.num_blocks)
        free, cached = {*self._free, *untouched}, {*self._cached, *self.leased.cached}
        assert self._cached.keys().isdisjoint(self.leased.cached), "a block is cached twice"
        assert all(self._references[block] for block in self._dropped), "an unused block waits for its release"
        self.leased.assert_invariants(self._references)
        used = {block for block, references in enumerate(self._references) if references}
        assert len(free) == self.num_free, "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert not free & used, "a block is free and used"
        assert not cached & used, "a block is cached and used"
        assert len(free) + len(used) + len(cached) == self.num_blocks, "a block is lost"
        named = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert named == self._block_of, "keys and blocks disagree"
        self._branches.assert_invariants()
        findable = set(named.values()) | {block for block in range(self.num_blocks) if block in self._branches}
        assert not free & findable, "a free block has a name"
        assert cached <= findable, "a cached block has no name"
        for blocks, counts in ((used, self.used_by), (cached, self.cached_by)):
            by_group = Counter(self._group_of[block] for block in blocks)
            assert [by_group[group] for group in range(len(counts))] == counts, "a group's blocks are counted wrongly"
        if owners is not None:
            counted = {block: self._references[block] for block in used}
            assert counted == owners, f"references {counted} differ from owners {owners}"

    def _evict(self) -> int:
        if self._cached:
            block, _ = self._cached.popitem(last=False)
        else:
            block = self.leased.oldest()
            if self.leased.on_given_away is not None:
                self.leased.on_given_away(block)
            self.leased.end(block, "evicted")
        self.cached_by[self._group_of[block]] -= 1
        self._unname(block)
        self.num_evicted += 1
        return block

    def _unname(self, block: int) -> None:
        key = self._key_of[block]
        if block in self.leased:
            self.leased.end(block, "reset")
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            if self._events is not None:
                self._events.removed(key[:KEY_BYTES], self._group_of[block])
        self._branches.remove(block)


def in_group(key: bytes, group: int) -> bytes:
    """Keys have one length, so no two of different groups are equal."""
    return key + group.to_bytes(2) if group else key
