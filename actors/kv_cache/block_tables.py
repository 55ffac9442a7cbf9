"""Block tables of sequences over the pool of all cache groups, with prefix reuse.

A sequence's table has one list of blocks per group. Groups that keep everything have blocks for all of a sequence's
known tokens from its start on. A group with a sliding window has them for what is computed next and for what that sees:
its list grows with the spans, and what fell behind the window is given back and leaves a NULL_BLOCK. Such blocks stay
findable until they are evicted; a prefix counts as found when each group has what the token behind it sees.
"""

from troupellm.actors.kv_cache.block_hash import PrefixHasher
from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.kv_cache.events import BlockEvents
from troupellm.actors.kv_cache.prefix_search import IN_HOST, WithHost, find_prefix, first_seen, unseen_left_out
from troupellm.actors.kv_cache.state_tables import StatePrefix, StateTables
from troupellm.actors.kv_cache.tiers import Tiers, named_hits
from troupellm.actors.sequences.parts import HostHit, SharedPrompt
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.worker import NULL_BLOCK, BlockCopy, CacheGroup


class BlockTables:
    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        block_size: int,
        *,
        caching: bool,
        secret: bytes,
        events: BlockEvents | None = None,
        state_slots: int = 0,
        state_interval: int = 0,
    ) -> None:
        """
        Args:
            state_slots: as of `WorkerReady`.
            state_interval: as of `StateTables`.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = caching
        self.windows = tuple(group.sliding_window for group in groups)
        self._all_kept: tuple[int | None, ...] = (None,) * len(groups)
        self._slides = self.windows != self._all_kept
        self._plain = self.windows == (None,)
        """One group that keeps everything: the usual case, on the fast path."""
        self._events = events
        self.pool = BlockPool(num_blocks, len(groups), events)
        self.hasher = PrefixHasher(secret, block_size)
        self._copies: dict[int, BlockCopy] = {}
        """Copies that the next plan makes before it computes, by target. A source may be given away or written
        meanwhile: plans are executed in their order, and a plan's copies are read before anything of it is written. Of
        two copies into one block the last counts: the sequence that wanted the first has lost the block meanwhile."""
        self._copied: tuple[BlockCopy, ...] = ()  # of the plan before it, which may be under way
        self.tiers: Tiers | None = None
        self.num_state_slots = state_slots
        self.states = StateTables(state_slots, state_interval, self) if state_slots else None
        """Of a model that has states beside keys and values."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        """Found on the device."""
        self.num_found_tokens = 0
        """In host memory too."""
        self._age = 0
        self._evicted_before = 0
        """From pools that are gone."""

    @property
    def cache_age(self) -> int:
        """How often the cache was reset."""
        return self._age

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were given away."""
        return self._evicted_before + self.pool.num_evicted

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def windows_of(self, sequence: Sequence) -> tuple[int | None, ...]:
        """Each group's window. A beam keeps all blocks, since a step may let another beam go on from far behind it."""
        return self._all_kept if sequence.is_beam else self.windows

    def admit(
        self, sequence: Sequence, reserve: int, shared_prompt: SharedPrompt | None = None, *, span: int | None = None
    ) -> bool:
        """Give a sequence blocks for all its known tokens, found ones first; False changes nothing.

        Found tokens count as computed, so the sequence starts behind them: behind full blocks that it shares, and
        behind the first positions of one more that are copied into its own. Its last known token is never among them,
        because the step must have something to compute logits from. `reserve` blocks stay available for others.

        Args:
            shared prompt: what was computed for the sequence's request; used instead of the prefix cache.
            span: tokens that the sequence computes first, at most, for which alone groups with a window get blocks.
        """
        if not sequence.reads_prefix_cache:
            shared_prompt = None
        caching = self.caching and sequence.reads_prefix_cache and shared_prompt is None
        windows, size, pool = self.windows_of(sequence), self.block_size, self.pool
        hits, beginnings, num_copied, prefix = self._found(sequence, shared_prompt, caching=caching)
        num_hits = len(hits[0])
        known = len(sequence.tokens)
        start = num_hits * size + num_copied
        ends = [known if span is None or window is None else min(known, start + span) for window in windows]
        missing = [self.blocks_for(end) - num_hits for end in ends]
        if self._slides:
            hits = [unseen_left_out(found, window, start, size) for found, window in zip(hits, windows, strict=True)]
        loads = [] if self.tiers is None else [[i for i, b in enumerate(found) if b == IN_HOST] for found in hits]
        held = self._held(hits, loads)
        missing = [count + len(load) for count, load in zip(missing, loads, strict=True)] if loads else missing
        if pool.num_available - sum(map(pool.count_unused, held)) < sum(missing) + reserve:
            return False
        if self.states is not None:
            if not self.states.slots.available:
                return False
            self.states.begin(sequence, prefix)
        origins = [self._origin(block) for block in beginnings]
        for group, found in enumerate(held):
            pool.share(found, group)
        for block in beginnings:
            pool.touch(block)
        for group, found in enumerate(hits):
            fresh = pool.take(missing[group], group)
            if loads:
                for index in loads[group]:
                    found[index] = fresh.pop()
            sequence.tables[group] = found + fresh
            if num_copied and beginnings[group] != fresh[0]:
                self._copies[fresh[0]] = BlockCopy(group, origins[group], fresh[0])
        sequence.capacity = min(map(len, sequence.tables)) * size
        sequence.num_computed = sequence.num_confirmed_prefill = start
        sequence.num_cached_blocks = num_hits
        sequence.tiers.num_offered = 0 if shared_prompt is None else num_hits
        sequence.cache_age = self._age if shared_prompt is None else shared_prompt.cache_age
        if any(loads):
            sequence.tiers.host_hits = named_hits(sequence, loads, self.block_size)
        if caching:
            self.num_queried_tokens += known
            self.num_found_tokens += start
            loaded = set().union(*loads)
            first = first_seen(hits) if loaded else 0
            self.num_hit_tokens += start - (len(loaded) + (first if first in loaded else 0)) * size
        return True

    def _found(
        self, sequence: Sequence, shared_prompt: SharedPrompt | None, *, caching: bool
    ) -> tuple[list[list[int]], tuple[int, ...], int, StatePrefix]:
        """A sequence's known prefix: blocks per group, the block of each group to copy from behind those, how many
        positions of it, and the prefix of the state that stands there."""
        if shared_prompt is not None:
            return *shared_prompt.before(len(sequence.tokens) - 1, self.block_size), StatePrefix()
        if not caching:
            return [[] for _ in self.windows], (), 0, StatePrefix()
        hits = self.find_prefix(sequence)
        if self.states is None:
            return hits, *self._find_beginnings(sequence, len(hits[0])), StatePrefix()
        while True:
            for prefix in self.states.candidates(sequence, len(hits[0])):
                beginnings, num_copied = self._find_beginnings(sequence, prefix.num_blocks, len(prefix.tail) // 4)
                if 4 * num_copied == len(prefix.tail):
                    break
            if prefix.num_blocks == len(hits[0]):
                return hits, beginnings, num_copied, prefix
            hits = self.find_prefix(sequence, prefix.num_blocks)

    def own(self, sequence: Sequence, position: int) -> tuple[tuple[int, ...], ...] | None:
        """Make sure that the sequence alone holds the block of a position that it is about to write, its tables' last.

        Returns:
            a block per group that takes the place of a shared one once that was copied; () where nothing is shared;
            None when there are too few blocks.
        """
        last = position // self.block_size
        pool = self.pool
        if all(pool.references(table[last]) == 1 for table in sequence.tables):
            return ()
        if pool.num_available < len(sequence.tables):
            return None
        added = []
        for group, table in enumerate(sequence.tables):
            (block,) = pool.take(1, group)
            self._copies[block] = BlockCopy(group, self._origin(table[last]), block)
            pool.release([table[last]], group)
            table[last] = block
            added.append((block,))
        return tuple(added)

    def grow(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...] | None:
        """Extend the tables to cover `num_positions`; the new blocks per group, or None when there are too few.

        Blocks that fell behind a window are given back before: at first confirmed ones, which stay findable, and if
        that does not suffice, all that no step from here on reads.
        """
        pool, wanted, tables = self.pool, self.blocks_for(num_positions), sequence.tables
        self.cache_blocks(sequence)
        if self._plain:
            missing_blocks = wanted - len(tables[0])
            if pool.num_available < missing_blocks:
                return None
            blocks = pool.take(missing_blocks)
            tables[0] += blocks
            sequence.capacity += missing_blocks * self.block_size
            return (tuple(blocks),)
        slides = self._slides and not sequence.is_beam
        if slides:
            self._slide(sequence, sequence.num_confirmed)
        missing = [max(0, wanted - len(table)) for table in tables]
        needed = sum(missing)
        if pool.num_available < needed and slides:
            self._slide(sequence, sequence.num_computed)
        if pool.num_available < needed:
            return None
        added = []
        for group, table in enumerate(tables):
            blocks = pool.take(missing[group], group)
            table += blocks
            added.append(tuple(blocks))
        sequence.capacity = min([len(table) for table in tables]) * self.block_size
        return tuple(added)

    def cache_blocks(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full of confirmed positions."""
        if not self.may_cache(sequence):
            return
        size, first = self.block_size, sequence.num_cached_blocks
        num_full = sequence.num_confirmed // size
        if num_full <= first:
            return
        keys, contents = sequence.keys, sequence.tokens[first * size : num_full * size].tobytes()
        if len(keys) == first + 1:  # as with every block that an answer fills
            self.hasher.extend(keys, contents, sequence.request.marks)
        else:
            self.extend_keys(sequence, num_full)
        adapter, marks = sequence.request.adapter_name, sequence.request.marks
        for table in sequence.tables:
            for index, block in enumerate(table[first:num_full]):
                if block != NULL_BLOCK:
                    tokens = contents[4 * size * index : 4 * size * (index + 1)]
                    key, parent, whole = keys[first + index + 1], keys[first + index], first + index in marks
                    self.pool.cache_block(block, key, parent, tokens, adapter, whole=whole)
        sequence.num_cached_blocks = num_full
        if self.tiers is not None:
            self.tiers.offer(sequence)

    def cache_loaded_block(self, hit: HostHit, adapter: str) -> None:
        """Let others find a block that has come back to the device. `adapter`: see `BlockPool.cache_block`."""
        if hit.cache_age == self._age:
            self.pool.cache_block(hit.block, hit.chained, hit.parent, hit.tokens, adapter, whole=hit.whole)

    def cache_all_blocks(self, sequence: Sequence) -> None:
        """Let others find everything that is confirmed, the beginning of a block too."""
        self.cache_blocks(sequence)
        if not self.may_cache(sequence):
            return
        num_full, rest = divmod(sequence.num_confirmed, self.block_size)
        if not rest or sequence.num_cached_blocks != num_full or num_full in sequence.request.marks:
            return
        begin = num_full * self.block_size
        content = sequence.tokens[begin : begin + rest].tobytes()
        keys = self.extend_keys(sequence, num_full)
        for table in sequence.tables:
            if table[num_full] != NULL_BLOCK:
                self.pool.cache_partial_block(table[num_full], keys[num_full], content)

    def forget(self, sequence: Sequence) -> None:
        """Do not let others find the sequence's blocks, whose contents cannot be trusted."""
        for table in sequence.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.forget(block)
        if self.states is not None:
            self.states.forget(sequence)

    def reset(self) -> None:
        """Nothing that is computed now is found later, not even what those who run go on to compute."""
        self._age += 1
        self.pool.forget_all()
        if self.states is not None:
            self.states.slots.forget_all()

    def rebuild(self, num_blocks: int, state_slots: int = 0) -> None:
        """Start over with the worker's new memory: it is empty, and no sequence holds a block of it."""
        self.num_blocks = num_blocks
        self._evicted_before = self.num_evicted
        self.pool = BlockPool(num_blocks, len(self.windows), self._events, self.pool.leased)
        if self._events is not None:
            self._events.cleared()
        self._copies.clear()
        self._copied = ()
        self.num_state_slots = state_slots
        if self.states is not None:
            self.states.rebuild(state_slots)

    def share(self, tables: list[list[int]]) -> None:
        """One more reference to each block of the tables."""
        for group, table in enumerate(self._held(tables)):
            self.pool.share(table, group)

    def release(self, tables: list[list[int]]) -> None:
        for group, table in enumerate(self._held(tables)):
            self.pool.release(table, group)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the next plan makes, every block at most once; the worker reads all sources before any
        target."""
        if not self._copies and not self._copied:
            return ()
        copies = self._copied = tuple(self._copies.values())
        self._copies.clear()
        return copies

    def being_copied(self, block: int) -> bool:
        """Whether the next plan, or the one before it, copies from or to a block."""
        return any(block in (copy.source, copy.target) for copy in (*self._copies.values(), *self._copied))

    def _slide(self, sequence: Sequence, position: int) -> None:
        """Give back blocks that are not read from `position` on, or from one before it: see `window_blocks`."""
        for group, (window, table) in enumerate(zip(self.windows, sequence.tables, strict=True)):
            if window is None:
                continue
            end = index = max(0, position - window) // self.block_size
            while index > 0 and table[index - 1] != NULL_BLOCK:
                index -= 1
            if index < end:
                self.pool.release(table[index:end], group)
                table[index:end] = [NULL_BLOCK] * (end - index)

    def _held(self, tables: list[list[int]], loads: list[list[int]] | None = None) -> list[list[int]]:
        """The tables without what was given back, or is to be loaded at the indices given."""
        if not self._slides and not (loads and any(loads)):
            return tables
        return [[block for block in table if block >= 0] for table in tables]

    def _origin(self, block: int) -> int:
        """Where a block's content lies now: itself, or what is to be copied into it."""
        copy = self._copies.get(block)
        return block if copy is None else copy.source

    def may_cache(self, sequence: Sequence) -> bool:
        """A key stands for all tokens before its block too, so what was computed on top of a reset cache has none."""
        return self.caching and sequence.cache_age == self._age

    def extend_keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The sequence's keys, extended to cover its first `num_blocks` blocks.

        They may end anywhere before: a sequence that starts behind a shared prompt has cached blocks that it never
        hashed.
        """
        keys = sequence.keys
        if (named := len(keys) - 1) < num_blocks:
            contents = sequence.tokens[named * self.block_size : num_blocks * self.block_size].tobytes()
            self.hasher.extend(keys, contents, sequence.request.marks)
        return keys

    def useful_blocks(self, sequence: Sequence) -> int:
        """How many blocks a sequence may begin behind."""
        most = (len(sequence.tokens) - 1) // self.block_size
        return most if self.states is None else self.states.reach(self.extend_keys(sequence, most)[1 : most + 1])

    def find_prefix(self, sequence: Sequence, most: int | None = None) -> list[list[int]]:
        """Blocks per group of the longest known prefix, of at most `most` blocks, that leaves at least the last token
        to compute; IN_HOST where host memory has one."""
        longest = (len(sequence.tokens) - 1) // self.block_size if most is None else most
        keys = self.extend_keys(sequence, longest)[1 : longest + 1]
        known = (
            self.pool
            if (tiers := self.tiers) is None or not tiers.reads(sequence)
            else WithHost(self.pool, tiers.in_host)
        )
        return find_prefix(known, keys, self.windows_of(sequence), self.block_size)

    def _find_beginnings(
        self, sequence: Sequence, num_hits: int, most: int | None = None
    ) -> tuple[tuple[int, ...], int]:
        """The block of each group to copy from behind the first `num_hits` blocks, and how many positions of it, at
        most so many."""
        begin = num_hits * self.block_size
        end = min(begin + (self.block_size if most is None else most), len(sequence.tokens) - 1)
        if end <= begin or num_hits in sequence.request.marks:
            return (), 0
        wanted = sequence.tokens[begin:end].tobytes()
        known = []
        for group in range(len(self.windows)):
            beginning = self.pool.find_beginning(sequence.keys[num_hits], wanted, group)
            if beginning is None:
                return (), 0
            known.append(beginning)
        return tuple(block for block, _ in known), min(count for _, count in known)
