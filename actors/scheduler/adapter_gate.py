"""Sequences of adapters wait outside the batch until the worker has their adapter and a slot is free for it.

The gate decides what the worker's host memory holds: it asks the adapter library to have an adapter read before a plan
puts it into a slot, and to drop the one that was used longest ago where there is no room for another. Slots keep their
content without it. A lost worker has none of both.

A sequence without a slot holds no other sequence back. When a slot is free, the waiting adapter goes first whose turn
comes first by fair shares and arrival. Where an adapter's own requests keep its slot, one that has waited for
`PATIENCE_SECONDS` closes the slot that the fewest sequences use: no further request may use it, and readers who do not
read give up their blocks there. An adapter keeps its slot for as long at least.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from troupellm.actors.scheduler.adapter_slots import Slot
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.plans import PlansInFlight
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.sequences.sequence import Request, Sequence, State
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.errors import AdapterError, EngineStopped, TroupeError
from troupellm.protocol.messages.adapter_library import AdapterAsk, DropAdapter, ServeAdapter
from troupellm.protocol.messages.adapters import AdapterRef
from troupellm.protocol.messages.scheduler import AdapterLoaded
from troupellm.protocol.messages.snapshot import AdapterSnapshot
from troupellm.protocol.messages.worker import AdapterSlot

PATIENCE_SECONDS: Final = 1.0
REVIEW_SECONDS: Final = 0.25
"""How often the slots are looked at while sequences wait for one and nothing changes."""
_NO_STEP: Final = -1
_ABOUT_TO_START: Final = frozenset({State.WAITING, State.PREEMPTED})

EndRequest = Callable[[Request, TroupeError], None]
_Groups = dict[str, list[Sequence]]
"""Waiting sequences by the digest of their adapter."""


class AdapterGate:
    def __init__(
        self,
        running_set: RunningSet,
        plans_in_flight: PlansInFlight,
        fair_share: FairShare,
        end_request: EndRequest,
        host_adapters: int,
    ) -> None:
        """host_adapters: that host memory holds."""
        self.slots = running_set.adapter_slots
        self._running_set = running_set
        self._in_flight = plans_in_flight
        self._fair_share = fair_share
        self._end_request = end_request
        self._host_adapters = host_adapters
        self._held: dict[int, Sequence] = {}
        """By row."""
        self._let_go: list[Sequence] = []
        """Those that went back to the waiting queue and, as far as is known, have not begun yet."""
        self._loaded: OrderedDict[str, int] = OrderedDict()
        """Digests in the worker's host memory, the least recently used first, and the newest plan that copies each."""
        self._loading: set[str] = set()
        """Digests that the library was asked for."""
        self._wanted: dict[str, str] = {}
        """Folders by digest, of adapters that are to be read though no sequence waits for them."""
        self._asks: list[AdapterAsk] = []
        self._members: set[Request] | None = None
        """As of the last review."""
        self._dirty = False
        """Something has changed that waiting sequences may have waited for."""
        self._next_review = math.inf
        self.num_loads = 0
        self.num_drops = 0

    @property
    def held(self) -> list[Sequence]:
        """Sequences that wait for nothing but their adapter."""
        return [s for s in list(self._held.values()) if s.state is State.HELD and not s.request.paused]

    @property
    def next_review(self) -> float | None:
        """When the next plan is due though nothing happens, in seconds; None while no sequence waits."""
        return self._next_review if self._held else None

    def snapshot(self, sequences: Iterable[Sequence]) -> AdapterSnapshot:
        """sequences: all open ones."""
        running = {_adapter(sequence).name for slot in self.slots for sequence in list(slot.rows.values())}
        waiting = {s.request.adapter.name for s in sequences if s.request.adapter is not None and not s.ended} - running
        return AdapterSnapshot(
            slots=self.slots.size,
            slots_used=sum(bool(slot.rows) for slot in self.slots),
            running=tuple(sorted(running)),
            waiting=tuple(sorted(waiting)),
            host=len(self._loaded),
            loads=self.num_loads,
            drops=self.num_drops,
            slot_changes=self.slots.num_changes,
        )

    def lacks(self, sequence: Sequence) -> bool:
        """Whether a sequence must wait before it is admitted."""
        adapter = sequence.request.adapter
        if adapter is None:
            return False
        if adapter.digest in self._loaded:
            self._loaded.move_to_end(adapter.digest)
        elif self.slots.find(adapter.digest) is None:
            return True
        return not self.slots.admits(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Move a sequence out of the waiting queue until it may begin, and have its adapter read if the worker does not
        have it."""
        self._running_set.hold(sequence)
        self._held[sequence.row] = sequence
        self._next_review = min(self._next_review, self.slots.now + REVIEW_SECONDS)
        self._load(_adapter(sequence))

    def want(self, digest: str, folder: str) -> None:
        """Have an adapter read, as soon as there is room for it."""
        self._wanted[digest] = folder
        self._load_wanted()

    def review(self, now: float, members: set[Request] | None) -> None:
        """Before a plan is drawn up: those that may have a slot now go back to the waiting queue.

        Args:
            members: the requests that may be computed now; None lets everybody. Others take no room from them.
        """
        slots = self.slots
        slots.now = now
        if members is not self._members:
            self._members, self._dirty = members, True
        self._load_wanted()
        if not self._held:
            self._next_review = math.inf
            return
        if not (self._dirty or slots.freed or now >= self._next_review):
            return
        self._dirty = slots.freed = False
        self._next_review = now + REVIEW_SECONDS
        self._held = {sequence.row: sequence for sequence in self.held}
        groups: _Groups = {}
        for sequence in sorted(filter(self._counts, self._held.values()), key=self._turn):
            groups.setdefault(_adapter(sequence).digest, []).append(sequence)
        for group in groups.values():
            self._load(_adapter(group[0]))
        groups = {digest: group for digest, group in groups.items() if self._has(digest)}
        self._close_slots(groups, now)
        num_free = sum(not slot.rows for slot in slots)
        for digest, group in groups.items():
            slot = slots.find(digest)
            if slot is None or not slot.rows:
                if num_free <= 0:
                    continue
                num_free -= 1
            elif slot.closed:
                continue
            self._release(group)

    def answer(self, loaded: AdapterLoaded, *, lost: bool) -> None:
        """The worker has read an adapter, or cannot: then the requests that wait for it end.

        Args:
            lost: a worker that was lost was asked. It may be the present one, started over, that has read the adapter.
        """
        digest, preparation = loaded.digest, loaded.preparation
        if lost:
            if preparation.outcome == "prepared" and digest not in self._loaded and digest not in self._loading:
                self._asks.append(DropAdapter(digest))
            return
        self._wanted.pop(digest, None)
        self._loading.discard(digest)
        if preparation.outcome == "gone":  # asked again after a while, until there is a worker
            return
        self._dirty = True
        if preparation.outcome == "prepared":
            self.num_loads += 1
            self._loaded.setdefault(digest, _NO_STEP)
            self._loaded.move_to_end(digest)
            return
        if preparation.outcome == "late" and digest not in self._loaded:
            self._asks.append(DropAdapter(digest))  # it may be read after all
        for request in {s.request.number: s.request for s in self.held if _adapter(s).digest == digest}.values():
            error: TroupeError = AdapterError(preparation.error)
            if preparation.outcome == "late":
                error = EngineStopped(preparation.error, code="server_is_overloaded")
            self._end_request(request, error)

    def take_changes(self, step: int) -> tuple[AdapterSlot, ...]:
        """Slots that get another content with a plan."""
        changes = self.slots.take_changes()
        for change in changes:
            self._loaded[change.digest] = step
        return changes

    def take_asks(self) -> list[AdapterAsk]:
        """For the adapter library."""
        asks, self._asks = self._asks, []
        return asks

    def forget(self) -> None:
        """The worker is lost with all that it had read."""
        self.slots.forget()
        self._loaded.clear()
        self._loading.clear()
        self._asks.clear()
        self._dirty = True

    def assert_invariants(self) -> None:
        expected = len(self._loaded.keys() | self._loading)
        assert expected <= self._host_adapters, "the worker is asked for more adapters than it holds"
        for change in self.slots.changes.values():
            assert change in self._loaded, "a slot is to get an adapter that the worker does not have"

    def _load(self, adapter: AdapterRef) -> None:
        """Ask for an adapter that the worker does not have, if there is room for it."""
        digest = adapter.digest
        if not self._has(digest) and digest not in self._loading and self._make_room():
            self._loading.add(digest)
            self._asks.append(ServeAdapter(digest, adapter.folder))

    def _load_wanted(self) -> None:
        for digest, folder in self._wanted.items():
            if digest not in self._loading and (digest in self._loaded or self._make_room()):
                self._loading.add(digest)
                self._asks.append(ServeAdapter(digest, folder))

    def _has(self, digest: str) -> bool:
        """Whether the worker has an adapter, in host memory or in a slot."""
        return digest in self._loaded or self.slots.find(digest) is not None

    def _release(self, group: list[Sequence]) -> None:
        for sequence in group:
            del self._held[sequence.row]
            self._running_set.let_go(sequence)
        self._let_go = [sequence for sequence in (*self._let_go, *group) if sequence.state in _ABOUT_TO_START]

    def _make_room(self) -> bool:
        """Make room for one more adapter: drop those from host memory that no sequence waits for and that no plan
        copies any more. False if that does not suffice."""
        excess = len(self._loaded.keys() | self._loading) + 1 - self._host_adapters
        if excess <= 0:
            return True
        self._let_go = [sequence for sequence in self._let_go if sequence.state in _ABOUT_TO_START]
        kept = {_adapter(sequence).digest for sequence in filter(self._counts, (*self.held, *self._let_go))}
        kept.update(self.slots.changes.values())
        kept.update(self._wanted)
        last_returned = self._in_flight.last_returned
        droppable = [digest for digest, step in self._loaded.items() if step <= last_returned and digest not in kept]
        for digest in droppable[:excess]:
            del self._loaded[digest]
            self._asks.append(DropAdapter(digest))
            self.num_drops += 1
        return excess <= len(droppable)

    def _close_slots(self, groups: _Groups, now: float) -> None:
        """Close one slot for each adapter that has waited too long and gets no free one."""
        patient = now - PATIENCE_SECONDS
        num_wanted = -sum(not slot.rows for slot in self.slots)
        for digest, group in groups.items():
            if self.slots.find(digest) is None:
                num_wanted += min(sequence.request.arrival for sequence in group) <= patient
        candidates = [slot for slot in self.slots if slot.rows and (slot.closed or slot.since <= patient)]
        candidates.sort(key=lambda slot: (not slot.closed, _num_reading(slot)))
        for slot in self.slots:
            slot.closed = False
        for slot in candidates[: max(0, num_wanted)]:
            slot.closed = True
            if not _num_reading(slot):
                for sequence in list(slot.rows.values()):
                    self._running_set.preempt(sequence)

    def _counts(self, sequence: Sequence) -> bool:
        """Whether a sequence may be computed now."""
        return self._members is None or sequence.request in self._members

    def _turn(self, sequence: Sequence) -> tuple[float, tuple[int, int, int]]:
        """Smaller is served first, as in the waiting queue."""
        return self._fair_share.served(sequence.request.tenant), sequence.arrival_key


def make_adapter_gate(
    config: LoraConfig | None,
    running_set: RunningSet,
    plans_in_flight: PlansInFlight,
    fair_share: FairShare,
    end_request: EndRequest,
) -> AdapterGate | None:
    """None where the worker has no slots."""
    if config is None or not running_set.adapter_slots.size:
        return None
    return AdapterGate(running_set, plans_in_flight, fair_share, end_request, config.host_adapters)


def _adapter(sequence: Sequence) -> AdapterRef:
    adapter = sequence.request.adapter
    assert adapter is not None
    return adapter


def _num_reading(slot: Slot) -> int:
    """Sequences of a slot that go on, since their reader reads."""
    return sum(sequence.state is not State.PAUSED for sequence in slot.rows.values())
