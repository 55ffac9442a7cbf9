"""Block tables of sequences over the pools of all cache groups, with prefix reuse.

All groups cover the same positions: a sequence's table has one list of blocks per group, equally long. Blocks behind a
sliding window are kept until the sequence ends, so a window saves computation, not blocks.
"""

from troupellm.actors.scheduler.block_pool import BlockPool
from troupellm.actors.scheduler.prefix_cache import PrefixHasher
from troupellm.actors.scheduler.sequence import Sequence


class BlockTables:
    def __init__(self, num_groups: int, num_blocks: int, block_size: int, *, caching: bool, secret: bytes) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = caching
        self.pools = tuple(BlockPool(num_blocks) for _ in range(num_groups))
        self._hasher = PrefixHasher(secret, block_size)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, reserve: int) -> bool:
        """Give a sequence blocks for all its known tokens, found ones first; False changes nothing.

        The blocks found are full and computed, so the sequence starts behind them; its last known token is never among
        them, because the step must have something to compute logits from. `reserve` blocks stay available for others.
        """
        hits = self._find_prefix(sequence) if self.caching and sequence.reads_prefix_cache else [[] for _ in self.pools]
        num_hits = len(hits[0])
        missing = self.blocks_for(len(sequence.tokens)) - num_hits
        for pool, found in zip(self.pools, hits, strict=True):
            revived = sum(1 for block in found if pool.references(block) == 0)
            if pool.num_available - revived < missing + reserve:
                return False
        for group, (pool, found) in enumerate(zip(self.pools, hits, strict=True)):
            pool.share(found)
            sequence.tables[group] = found + pool.take(missing)
        sequence.capacity = (num_hits + missing) * self.block_size
        sequence.num_computed = sequence.num_confirmed_prefill = num_hits * self.block_size
        sequence.num_labelled = num_hits
        if self.caching and sequence.reads_prefix_cache:
            self.num_queried_tokens += len(sequence.tokens)
            self.num_hit_tokens += sequence.num_computed
        return True

    def grow(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...] | None:
        """Extend the tables to cover `num_positions`; the new blocks per group, or None when there are too few."""
        missing = self.blocks_for(num_positions) - len(sequence.tables[0])
        if any(pool.num_available < missing for pool in self.pools):
            return None
        self.label(sequence)
        added = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            blocks = pool.take(missing)
            table.extend(blocks)
            added.append(tuple(blocks))
        sequence.capacity += missing * self.block_size
        return tuple(added)

    def label(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full of confirmed positions."""
        if not self.caching:
            return
        num_full = sequence.num_confirmed // self.block_size
        if num_full <= sequence.num_labelled:
            return
        self._name(sequence, num_full)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for index in range(sequence.num_labelled, num_full):
                pool.label(table[index], sequence.keys[index])
        sequence.num_labelled = num_full

    def release(self, tables: list[list[int]]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table)

    def _find_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Blocks per group of the longest known prefix that leaves at least the last token to compute.

        Names blocks only as far as they are found, so a prompt that nobody has sent before costs one hash.
        """
        longest = (len(sequence.tokens) - 1) // self.block_size
        hits: list[list[int]] = [[] for _ in self.pools]
        for index in range(longest):
            if index >= len(sequence.keys):
                self._name(sequence, index + 1)
            key = sequence.keys[index]
            blocks = [pool.find(key) for pool in self.pools]
            if None in blocks:
                break
            for found, block in zip(hits, blocks, strict=True):
                if block is not None:
                    found.append(block)
        return hits

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        """Compute a sequence's first keys; those of the prompt come from its first sibling, as far as that has them."""
        request, keys = sequence.request, sequence.keys
        elder = request.sequences[0].keys
        if len(elder) > len(keys):
            keys.extend(elder[len(keys) : request.num_prompt_tokens // self.block_size])
        self._hasher.extend(keys, request.prompt, sequence.tokens, num_blocks, request.extras)
