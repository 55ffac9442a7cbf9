"""Block tables of sequences over the pools of all cache groups, with prefix reuse.

All groups cover the same positions: a sequence's table has one list of blocks per group, equally long. Blocks behind a
sliding window are kept until the sequence ends, so a window saves computation, not blocks.
"""

from troupellm.actors.prefix_keys import PrefixHasher
from troupellm.actors.scheduler.block_pool import BlockPool
from troupellm.actors.scheduler.sequence import Sequence
from troupellm.actors.scheduler.trunk import Trunk
from troupellm.protocol.worker import BlockCopy


class BlockTables:
    def __init__(self, num_groups: int, num_blocks: int, block_size: int, *, caching: bool, secret: bytes) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = caching
        self.pools = tuple(BlockPool(num_blocks) for _ in range(num_groups))
        self.hasher = PrefixHasher(secret, block_size)
        self.copies: list[BlockCopy] = []
        """What the next plan must copy before it computes. A source may be given away or written meanwhile: plans are
        executed in their order, and a plan's copies read before anything of it is written."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._age = 0
        self._evicted_before = 0
        """From pools that are gone."""

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were given away."""
        return self._evicted_before + sum(pool.num_evicted for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, reserve: int, trunk: Trunk | None = None) -> bool:
        """Give a sequence blocks for all its known tokens, found ones first; False changes nothing.

        What is found is computed, so the sequence starts behind it: behind full blocks that it shares, and behind the
        first positions of one more that are copied into its own. Its last known token is never among them, because the
        step must have something to compute logits from. `reserve` blocks stay available for others.

        Args:
            trunk: what was computed for the sequence's request; used instead of the prefix cache.
        """
        if not sequence.reads_prefix_cache:
            trunk = None
        caching = self.caching and sequence.reads_prefix_cache and trunk is None
        if trunk is not None:
            hits = self._trunk_blocks(sequence, trunk)
        else:
            hits = self._find_prefix(sequence) if caching else [[] for _ in self.pools]
        num_hits = len(hits[0])
        missing = self.blocks_for(len(sequence.tokens)) - num_hits
        for pool, found in zip(self.pools, hits, strict=True):
            if pool.num_available - pool.count_unused(found) < missing + reserve:
                return False
        beginnings: tuple[int, ...] = ()
        num_copied = 0
        if trunk is not None:
            beginnings, num_copied = self._trunk_end(sequence, trunk)
        elif caching:
            beginnings, num_copied = self._find_beginnings(sequence, num_hits)
        for group, (pool, found) in enumerate(zip(self.pools, hits, strict=True)):
            pool.share(found)
            if num_copied:
                pool.touch(beginnings[group])
            fresh = pool.take(missing)
            sequence.tables[group] = found + fresh
            if num_copied and beginnings[group] != fresh[0]:
                self.copies.append(BlockCopy(group, beginnings[group], fresh[0]))
        sequence.capacity = (num_hits + missing) * self.block_size
        sequence.num_computed = sequence.num_confirmed_prefill = num_hits * self.block_size + num_copied
        sequence.num_labelled = num_hits
        sequence.cache_age = self._age if trunk is None else trunk.cache_age
        if caching:
            self.num_queried_tokens += len(sequence.tokens)
            self.num_hit_tokens += sequence.num_computed
        return True

    def own(self, sequence: Sequence, position: int) -> tuple[tuple[int, ...], ...] | None:
        """Make sure that the sequence alone holds the block of a position that it is about to write, its table's last.

        Returns:
            a block per group that takes the place of a shared one once that was copied; () where nothing is shared;
            None when there are too few blocks.
        """
        last = position // self.block_size
        held = [table[last] for table in sequence.tables]
        if all(pool.references(block) == 1 for pool, block in zip(self.pools, held, strict=True)):
            return ()
        if any(not pool.num_available for pool in self.pools):
            return None
        added = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            (block,) = pool.take(1)
            self.copies.append(BlockCopy(group, table[last], block))
            pool.release([table[last]])
            table[last] = block
            added.append((block,))
        return tuple(added)

    def grow(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...] | None:
        """Extend the tables to cover `num_positions`; the new blocks per group, or None when there are too few."""
        missing = self.blocks_for(num_positions) - len(sequence.tables[0])
        for pool in self.pools:
            if pool.num_available < missing:
                return None
        self.label(sequence)
        added = []
        for group, pool in enumerate(self.pools):
            blocks = pool.take(missing)
            sequence.tables[group] += blocks
            added.append(tuple(blocks))
        sequence.capacity += missing * self.block_size
        return tuple(added)

    def label(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full of confirmed positions."""
        if not self._may_label(sequence):
            return
        size, first = self.block_size, sequence.num_labelled
        num_full = sequence.num_confirmed // size
        if num_full <= first:
            return
        width = 4 * size
        keys = self._name_blocks(sequence, num_full)
        contents = sequence.tokens[first * size : num_full * size].tobytes()
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            for index in range(first, num_full):
                begin = (index - first) * width
                pool.label(table[index], keys[index + 1], keys[index], contents[begin : begin + width])
        sequence.num_labelled = num_full

    def label_all(self, sequence: Sequence) -> None:
        """Let others find everything that is confirmed, the beginning of a block too."""
        self.label(sequence)
        if not self._may_label(sequence):
            return
        num_full, rest = divmod(sequence.num_confirmed, self.block_size)
        if not rest or sequence.num_labelled != num_full:
            return
        begin = num_full * self.block_size
        content = sequence.tokens[begin : begin + rest].tobytes()
        keys = self._name_blocks(sequence, num_full)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.label_beginning(table[num_full], keys[num_full], content)

    def forget(self, sequence: Sequence) -> None:
        """What the sequence's blocks hold is not to be trusted: nobody else finds them."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for block in table:
                pool.forget(block)

    def reset(self) -> None:
        """Nothing that is computed now is found later, not even what those who run go on to compute."""
        self._age += 1
        for pool in self.pools:
            pool.forget_all()

    def rebuild(self, num_blocks: int) -> None:
        """The worker's memory is another one: nothing is in it, and nobody holds any of it."""
        self.num_blocks = num_blocks
        self._evicted_before = self.num_evicted
        self.pools = tuple(BlockPool(num_blocks) for _ in self.pools)
        self.copies.clear()

    def release(self, tables: list[list[int]]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Of two into one block the last counts: whoever wanted the first has lost the block meanwhile.

        The worker reads all sources before it writes any target, so a copy of a copy names the first one's source.
        """
        sources: dict[tuple[int, int], int] = {}
        for copy in self.copies:
            sources[copy.group, copy.target] = sources.get((copy.group, copy.source), copy.source)
        self.copies.clear()
        return tuple(BlockCopy(group, source, target) for (group, target), source in sources.items())

    def _may_label(self, sequence: Sequence) -> bool:
        """A key stands for all tokens before its block too, so what was computed on top of a reset cache has none."""
        return self.caching and sequence.cache_age == self._age

    def _name_blocks(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The sequence's keys, extended to cover its first `num_blocks` blocks.

        They may end anywhere before: a sequence that starts behind a trunk has labelled blocks that it never named.
        """
        keys = sequence.keys
        named = len(keys) - 1
        if named < num_blocks:
            self.hasher.extend(keys, sequence.tokens[named * self.block_size : num_blocks * self.block_size].tobytes())
        return keys

    def _find_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Blocks per group of the longest known prefix that leaves at least the last token to compute."""
        longest = (len(sequence.tokens) - 1) // self.block_size
        keys = self._name_blocks(sequence, longest)
        found = [pool.find_all(keys[1 : longest + 1]) for pool in self.pools]
        shortest = min(map(len, found))
        return [blocks[:shortest] for blocks in found]

    def _trunk_blocks(self, sequence: Sequence, trunk: Trunk) -> list[list[int]]:
        """Per group the full blocks of a trunk that the sequence shares."""
        full = min(trunk.num_positions, len(sequence.tokens) - 1) // self.block_size
        return [table[:full] for table in trunk.tables]

    def _trunk_end(self, sequence: Sequence, trunk: Trunk) -> tuple[tuple[int, ...], int]:
        """The block of each group to copy from behind those, and how many positions of it."""
        full, rest = divmod(min(trunk.num_positions, len(sequence.tokens) - 1), self.block_size)
        return (tuple(table[full] for table in trunk.tables), rest) if rest else ((), 0)

    def _find_beginnings(self, sequence: Sequence, num_hits: int) -> tuple[tuple[int, ...], int]:
        """The block of each group to copy from behind the first `num_hits` blocks, and how many positions of it."""
        begin = num_hits * self.block_size
        end = min(begin + self.block_size, len(sequence.tokens) - 1)
        if end <= begin:
            return (), 0
        wanted = sequence.tokens[begin:end].tobytes()
        found = [pool.find_beginning(sequence.keys[num_hits], wanted) for pool in self.pools]
        known = [beginning for beginning in found if beginning is not None]
        if len(known) < len(found):
            return (), 0
        return tuple(block for block, _ in known), min(count for _, count in known)
