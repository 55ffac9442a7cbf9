"""The worker's adapter slots: the adapter in each, and the sequences that use it.

A sequence uses a slot from when it is given blocks until it loses them, so paused sequences and those whose blocks are
loaded count. A slot that no sequence uses keeps its adapter until another one needs the slot. The worker hears of a new
content with the next plan, which also frees the rows of the old one.
"""

from collections.abc import Iterator

from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.worker import AdapterSlot


class Slot:
    """One slot."""

    __slots__ = ("closed", "digest", "number", "rows", "since", "used")

    def __init__(self, number: int) -> None:
        self.number = number
        self.digest = ""
        """Of the adapter in it; empty: none yet."""
        self.rows: dict[int, Sequence] = {}
        """Sequences that use it."""
        self.closed = False
        """Other adapters wait for it: no further request may use it."""
        self.since = 0.0
        """When its adapter got it, in seconds."""
        self.used = 0
        """Rises with each sequence that begins to use a slot."""


class AdapterSlots:
    def __init__(self, num_slots: int) -> None:
        self.now = 0.0
        """Of the last plan, in seconds."""
        self.freed = False
        """A slot has lost its last sequence since this was reset."""
        self.num_changes = 0
        """Adapters that were put into a slot so far."""
        self._slots = [Slot(number) for number in range(1, num_slots + 1)]
        self._uses = 0
        self.changes: dict[int, str] = {}
        """Slots whose content the worker has not heard of, and their adapters."""

    @property
    def size(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def find(self, digest: str) -> Slot | None:
        """The slot that an adapter has."""
        return next((slot for slot in self._slots if slot.digest == digest), None)

    def number_of(self, sequence: Sequence) -> int:
        """The slot that a sequence uses; 0 is the base model."""
        adapter = sequence.request.adapter
        if adapter is None:
            return 0
        slot = self.find(adapter.digest)
        assert slot is not None, "a sequence runs without its adapter"
        return slot.number

    def admits(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin now. A closed slot takes those whose siblings use it: beams need each other."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self.find(adapter.digest)
        if slot is None:
            return any(not other.rows for other in self._slots)
        return not slot.closed or any(other.row in slot.rows for other in sequence.request.sequences)

    def join(self, sequence: Sequence) -> None:
        """A sequence that was admitted has blocks now. Idempotent."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        slot = self.find(adapter.digest)
        if slot is None:
            slot = min((other for other in self._slots if not other.rows), key=lambda other: other.used)
            slot.digest, slot.since, slot.closed = adapter.digest, self.now, False
            self.changes[slot.number] = adapter.digest
            self.num_changes += 1
        self._uses += 1
        slot.used = self._uses
        slot.rows[sequence.row] = sequence

    def leave(self, sequence: Sequence) -> None:
        """A sequence has lost its blocks. Idempotent."""
        adapter = sequence.request.adapter
        slot = None if adapter is None else self.find(adapter.digest)
        if slot is not None and slot.rows.pop(sequence.row, None) is not None and not slot.rows:
            slot.closed, self.freed = False, True

    def take_changes(self) -> tuple[AdapterSlot, ...]:
        """For the next plan."""
        if not self.changes:
            return ()
        changes = tuple(AdapterSlot(number, digest) for number, digest in self.changes.items())
        self.changes.clear()
        return changes

    def forget(self) -> None:
        """The worker is lost, and the content of its slots with it."""
        for slot in self._slots:
            slot.digest, slot.closed = "", False
            slot.rows.clear()
        self.changes.clear()
        self.freed = True

    def assert_invariants(self, holders: dict[int, Sequence]) -> None:
        """
        Args:
            holders: by row, all sequences that have blocks or wait for a plan with them.
        """
        digests = [slot.digest for slot in self._slots if slot.digest]
        assert len(set(digests)) == len(digests), "two slots have one adapter"
        expected = {row for row, sequence in holders.items() if sequence.request.adapter is not None}
        used: set[int] = set()
        for slot in self._slots:
            assert slot.rows or not slot.closed, "a slot that nothing uses is closed"
            for row, sequence in slot.rows.items():
                adapter = sequence.request.adapter
                assert adapter is not None, "a sequence of the base model uses a slot"
                assert adapter.digest == slot.digest, "a sequence uses another adapter's slot"
                used.add(row)
        assert used == expected, "slots and running sequences disagree"
