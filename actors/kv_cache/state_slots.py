"""Slots for the states of models that remember more than keys and values, as recurrent layers do.

A state is all that such layers know of a sequence, and stands for exactly the tokens computed so far. A running
sequence owns one slot. A slot without an owner may hold a *snapshot*: a state that is found by the prefix that it
stands for, until its slot is wanted, least recently used first. So a slot is in exactly one of three places, as a block
is: owned, a snapshot, or free.

A prefix is named by the key of its full blocks and the tokens behind them, its *tail*. A snapshot under a lease gives
way after all others, as the blocks of its prefix do.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from troupellm.actors.kv_cache.leased_blocks import LeasedBlocks
from troupellm.actors.kv_cache.partial_blocks import common_tokens
from troupellm.protocol.messages.copies import NO_STATE, StateCopy

NO_SLOT: Final = -1


class StateSlots:
    """Slot numbers are 0 .. num_slots - 1."""

    def __init__(self, num_slots: int, leased: LeasedBlocks | None = None) -> None:
        """leased: knows the slots whose snapshots are evicted last."""
        self.num_slots = num_slots
        self.leased = LeasedBlocks() if leased is None else leased
        self.leased.begin(num_slots)
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        """Slots with snapshots, least recently used first, each with the key and the tail of its prefix."""
        self._tails: dict[bytes, dict[bytes, int]] = {}
        """By key, the slots of snapshots by their tails."""
        self._copies: dict[int, int] = {}
        """Copies that the next plan makes before it computes: target to source. As with blocks, sources are read before
        any target is written, and of two copies into one slot the last counts."""
        self.num_evicted = 0
        """Snapshots whose slots were given away."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def available(self) -> bool:
        """True if `take` has a slot to give."""
        return bool(self._free or self._snapshots)

    def take(self, snapshot: int = NO_SLOT) -> int:
        """A slot for a sequence that begins behind a prefix. The caller has checked `available`.

        Args:
            snapshot: the slot with the prefix's state, which may be the one that is given; NO_SLOT is no prefix.
        """
        source = NO_STATE
        if snapshot != NO_SLOT:
            self._use(snapshot)
            source = self._origin(snapshot)
        slot = self._free.pop() if self._free else self._evict()
        self._copies[slot] = source
        return slot

    def release(self, slot: int) -> None:
        """The state of an owned slot is of no use."""
        self._free.append(slot)

    def keep(self, slot: int, key: bytes, tail: bytes) -> None:
        """An owned slot becomes the snapshot of a prefix, unless there is one already."""
        if self._touch(key, tail):
            self.release(slot)
        else:
            self._name(slot, key, tail)

    def copy(self, slot: int, key: bytes) -> None:
        """Make a snapshot of the state that an owned slot has before the next plan computes, unless there is one, or no
        slot for one."""
        if self._touch(key, b"") or not self.available:
            return
        target = self._free.pop() if self._free else self._evict()
        self._copies[target] = self._origin(slot)
        self._name(target, key, b"")

    def has(self, key: bytes) -> bool:
        """True if there are snapshots of prefixes with these full blocks."""
        return key in self._tails

    def tails(self, key: bytes, tokens: bytes) -> list[tuple[bytes, int]]:
        """The snapshots of prefixes with these full blocks whose tail `tokens` (int32) begin with: tail and slot,
        longest first."""
        known = self._tails.get(key, {})
        found = [(tail, slot) for tail, slot in known.items() if 4 * common_tokens(tail, tokens) == len(tail)]
        return sorted(found, key=lambda entry: -len(entry[0]))

    def lease(self, owner: str, key: bytes, seconds: float) -> list[bytes]:
        """Lease the snapshots of prefixes with these full blocks; their tails."""
        tails = self._tails.get(key, {})
        granted, ended = self.leased.choose(owner, tuple(tails.values()))
        for slot, reason in ended:
            self.leased.end(slot, reason)
        for slot in granted:
            self.leased.add(owner, slot, seconds)
            self.leased.rest(slot)
        return list(tails)

    def end_leases(self, key: bytes) -> None:
        """Let the snapshots of prefixes with these full blocks be evicted as others are."""
        for slot in self._tails.get(key, {}).values():
            if slot in self.leased:
                self.leased.end(slot, "deleted")

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the snapshots of prefixes that end with one of these full blocks, or less than a block behind it."""
        for key in keys:
            for slot in tuple(self._tails.get(key, {}).values()):
                self._unname(slot)
                self.release(slot)

    def forget_all(self) -> None:
        """Drop all snapshots."""
        self.forget(tuple(self._tails))

    def take_copies(self) -> tuple[StateCopy, ...]:
        """The copies that the next plan makes, every target at most once."""
        if not self._copies:
            return ()
        copies = tuple(StateCopy(source, target) for target, source in self._copies.items())
        self._copies.clear()
        return copies

    def assert_invariants(self, owned: Sequence[int]) -> None:
        """Every slot is in one place. owned: the slots of all sequences."""
        places = [*owned, *self._snapshots, *self._free]
        assert sorted(places) == list(range(self.num_slots)), "a state slot is lost, or in two places"
        named = {slot: (key, tail) for key, tails in self._tails.items() for tail, slot in tails.items()}
        assert named == dict(self._snapshots), "a snapshot is found by another prefix than its own"
        self.leased.assert_invariants([int(slot not in self._snapshots) for slot in range(self.num_slots)])

    def _origin(self, slot: int) -> int:
        """Where a slot's state lies now: there, or where it is copied from by the next plan."""
        return self._copies.get(slot, slot)

    def _touch(self, key: bytes, tail: bytes) -> bool:
        slot = self._tails.get(key, {}).get(tail)
        if slot is not None:
            self._use(slot)
        return slot is not None

    def _use(self, slot: int) -> None:
        """A snapshot is the last used one, and its lease runs from now."""
        self._snapshots.move_to_end(slot)
        if slot in self.leased:
            self.leased.use(slot)
            self.leased.rest(slot)

    def _name(self, slot: int, key: bytes, tail: bytes) -> None:
        self._snapshots[slot] = (key, tail)
        self._tails.setdefault(key, {})[tail] = slot

    def _unname(self, slot: int) -> None:
        if slot in self.leased:
            self.leased.end(slot, "reset")
        key, tail = self._snapshots.pop(slot)
        tails = self._tails[key]
        del tails[tail]
        if not tails:
            del self._tails[key]

    def _evict(self) -> int:
        for slot in self.leased.expired():
            self.leased.end(slot, "expired")
        if len(self.leased) < len(self._snapshots):
            slot = next(slot for slot in self._snapshots if slot not in self.leased)
        else:
            slot = self.leased.oldest()
            self.leased.end(slot, "evicted")
        self._unname(slot)
        self.num_evicted += 1
        return slot
