"""The states of sequences: where a prefix with a snapshot ends, and when snapshots are made.

Keys and values are there for every position, a state only for where its sequence stands now. So a sequence can go on
behind a prefix only where a snapshot was made. Spans end at such places: before a prompt's last turn, before its end,
and at each multiple of the interval. The plan that goes on from there first copies the state. A sequence that ends or
is preempted leaves its slot as a snapshot of all that it has computed, anywhere within a block.

A plan that goes on from a snapshot comes behind the plans that compute it. They may be in flight: a failure makes the
snapshot's prefix unknown, as it does the sequence's blocks.
"""

from collections.abc import Iterable, Iterator, Sequence as SequenceOf
from typing import Final, NamedTuple, Protocol

from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.kv_cache.state_slots import NO_SLOT, StateSlots
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.snapshot import StatesSnapshot
from troupellm.protocol.messages.worker import NULL_BLOCK

LEAST_BLOCKS: Final = 4
"""Between two places in a prompt, and before the first: a step costs as much as to compute so few blocks again."""


def snapshot_places(borders: Iterable[int], num_prompt_tokens: int, block_size: int) -> tuple[int, ...]:
    """Where snapshots of a prompt's states are made: at the last borders of blocks before some of its tokens.

    Of two that are close the first one counts, since more prompts share it.

    Args:
        borders: tokens behind which another prompt may go on in another way; the end of the prompt is one.
    """
    places: list[int] = [0]
    for border in sorted({*borders, num_prompt_tokens - 1}):
        place = min(border, num_prompt_tokens - 1) // block_size * block_size
        if place >= places[-1] + LEAST_BLOCKS * block_size:
            places.append(place)
    return tuple(places[1:])


class PrefixNames(Protocol):
    """How the block tables name prefixes."""

    block_size: int
    pool: BlockPool

    def may_cache(self, sequence: Sequence) -> bool:
        """True if others may find what a sequence computes."""

    def extend_keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """A sequence's keys: of nothing, and of its first `num_blocks` blocks at least."""


class StatePrefix(NamedTuple):
    """A prefix that a sequence can go on behind."""

    num_blocks: int = 0
    tail: bytes = b""
    """Its tokens behind those full blocks, int32."""
    slot: int = NO_SLOT
    """Of its snapshot; NO_SLOT is the empty prefix."""


class StateTables:
    def __init__(self, num_slots: int, interval: int, names: PrefixNames) -> None:
        """interval: tokens between snapshots within a sequence, a multiple of the block size; 0 makes none."""
        self.slots = StateSlots(num_slots)
        self._interval, self._names = interval, names
        self._owned: dict[int, int] = {}
        """Slots by the rows of sequences that own one."""
        self._num_hits = self._evicted_before = 0

    def owns(self, sequence: Sequence) -> bool:
        """True if a sequence owns a slot."""
        return sequence.row in self._owned

    def slot_of(self, sequence: Sequence) -> int:
        """The slot that a sequence owns."""
        return self._owned[sequence.row]

    def candidates(self, sequence: Sequence, most: int) -> Iterator[StatePrefix]:
        """The prefixes of a sequence that have a snapshot, longest first, and the empty one at the end. All leave at
        least the last token to compute.

        Args:
            most: full blocks that a prefix may have.
        """
        size, tokens, keys = self._names.block_size, sequence.tokens, self._names.extend_keys(sequence, most)
        for count in range(most, -1, -1):
            if self.slots.has(keys[count]):
                behind = tokens[count * size : min(count * size + size, len(tokens) - 1)].tobytes()
                for tail, slot in self.slots.tails(keys[count], behind):
                    yield StatePrefix(count, tail, slot)
        yield StatePrefix()

    def reach(self, keys: SequenceOf[bytes]) -> int:
        """How many blocks of a prefix lie before its last snapshot: those behind that are of no use.

        Args:
            keys: of the blocks.
        """
        return next((count for count in range(len(keys), 0, -1) if self.slots.has(keys[count - 1])), 0)

    def lease(self, owner: str, keys: SequenceOf[bytes], seconds: float) -> list[tuple[bytes, bytes]]:
        """Lease the last snapshots of a prefix: the key of the full blocks before each, and its tail.

        Args:
            keys: as of `reach`.
        """
        count = self.reach(keys)
        if not count:
            return []
        self.slots.leased.now = self._names.pool.leased.now
        return [(keys[count - 1], tail) for tail in self.slots.lease(owner, keys[count - 1], seconds)]

    def begin(self, sequence: Sequence, prefix: StatePrefix) -> None:
        """Give a sequence a slot with a prefix's state. The caller has checked `slots.available`."""
        self.slots.leased.now = self._names.pool.leased.now
        self._owned[sequence.row] = self.slots.take(prefix.slot)
        self._num_hits += prefix.slot != NO_SLOT

    def span(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of the `count` tokens from `start` on a span takes, so that it ends where a snapshot is to be made.
        A span that begins at such a place makes one.
        """
        if not self._names.may_cache(sequence):
            return count
        size, places = self._names.block_size, list(sequence.request.borders)
        if self._interval:
            places += [start // self._interval * self._interval, (start // self._interval + 1) * self._interval]
        if start and start in places and start <= len(sequence.tokens):
            key = self._names.extend_keys(sequence, start // size)[start // size]
            self.slots.copy(self._owned[sequence.row], key)
        return min([count, *(place - start for place in places if place > start)])

    def leave(self, sequence: Sequence) -> None:
        """A sequence gives up its slot, if it has one: that becomes a snapshot where all tokens are known that it
        stands for."""
        slot, position = self._owned.pop(sequence.row, NO_SLOT), sequence.num_computed
        if slot == NO_SLOT:
            return
        if not (0 < position <= len(sequence.tokens) and self._names.may_cache(sequence)):
            self.slots.release(slot)
            return
        count = position // self._names.block_size
        key = self._names.extend_keys(sequence, count)[count]
        self.slots.keep(slot, key, sequence.tokens[count * self._names.block_size : position].tobytes())

    def cache_rest(self, sequence: Sequence, tables: list[list[int]]) -> None:
        """Let others find what plans in flight have computed of a sequence that ended meanwhile: its state is behind
        that. tables: those that it gave up."""
        names, size, adapter = self._names, self._names.block_size, sequence.request.adapter_name
        known, first = min(sequence.num_computed, len(sequence.tokens)), sequence.num_confirmed // size
        if known <= sequence.num_confirmed or not names.may_cache(sequence):
            return
        keys = names.extend_keys(sequence, known // size)
        for index in range(first, -(-known // size)):
            content = sequence.tokens[index * size : min(index * size + size, known)]
            for block in [table[index] for table in tables if table[index] != NULL_BLOCK]:
                if len(content) == size:
                    names.pool.cache_block(block, keys[index + 1], keys[index], content.tobytes(), adapter)
                else:
                    names.pool.cache_partial_block(block, keys[index], content.tobytes())

    def drop(self, sequence: Sequence) -> None:
        """A sequence gives up its slot, if it has one, and nothing is kept of it."""
        slot = self._owned.pop(sequence.row, NO_SLOT)
        if slot != NO_SLOT:
            self.slots.release(slot)

    def forget(self, sequence: Sequence) -> None:
        """A sequence's state is not to be trusted, nor are the snapshots of its prefixes."""
        self.drop(sequence)
        self.slots.forget(sequence.keys)

    def rebuild(self, num_slots: int) -> None:
        """Start over with the worker's new memory."""
        self._evicted_before += self.slots.num_evicted
        self.slots = StateSlots(num_slots, self.slots.leased)
        self._owned.clear()

    def snapshot(self, slot_bytes: int) -> StatesSnapshot:
        """For metrics. slot_bytes: of one slot."""
        return StatesSnapshot(
            slots=self.slots.num_slots,
            bytes=self.slots.num_slots * slot_bytes,
            used=len(self._owned),
            snapshots=self.slots.num_snapshots,
            hits=self._num_hits,
            evictions=self._evicted_before + self.slots.num_evicted,
        )

    def assert_invariants(self, holders: set[int]) -> None:
        """holders: rows of the sequences that have blocks."""
        assert self._owned.keys() == holders, "a sequence has blocks and no state, or a state and no blocks"
        self.slots.assert_invariants(list(self._owned.values()))
