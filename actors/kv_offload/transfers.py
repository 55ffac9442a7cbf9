"""Transfers and look-ups: those that the next plan asks for, those under way, and how many more there may be.

Each edge has credits: one for loads, one for stores between the device and host memory, and one for each direction of
an outer tier. Without a credit, loads and fetches wait; stores and spills are left out. A credit comes back with the
answer, of which there is exactly one per transfer, also if the transfer failed or was cancelled.
"""

from collections.abc import Callable
from typing import Final

from troupellm.protocol.messages.kv_transfers import (
    STORES,
    BlockTransfer,
    LookupDone,
    TierLookup,
    TransferDone,
    TransferKind,
)

LOADS: Final = 256
"""Blocks on their way from host memory to the device."""
OUTER: Final = 64
"""From and to one outer tier."""
LOOKUPS: Final = 32
"""Look-ups under way, of all tiers together."""

Edge = tuple[TransferKind, int]
"""(kind, tier), where spills and fetches of a tier share an edge."""
Done = Callable[[TransferDone], None]
Found = Callable[[int], None]


class Transfers:
    """`late` counts answers that came after the asking sequence had stopped waiting."""

    def __init__(self) -> None:
        self._ids = 0
        self._under_way: dict[int, tuple[Edge, Done]] = {}
        self._wanted: set[int] = set()
        """Of those, the ones that were not cancelled."""
        self._lookups: dict[int, Found] = {}
        self._load: dict[Edge, int] = {}
        self._new_transfers: list[BlockTransfer] = []
        self._new_lookups: list[TierLookup] = []
        self._new_cancelled: list[int] = []
        self.num_late = 0

    @property
    def busy(self) -> bool:
        """Something is under way, or wants to be told to the worker."""
        return bool(self._under_way or self._lookups)  # what is new is under way already

    @property
    def num_transfers(self) -> int:
        return len(self._under_way)

    @property
    def num_lookups(self) -> int:
        return len(self._lookups)

    def credits(self, kind: TransferKind, tier: int = 0) -> int:
        """How many more such transfers may begin."""
        most = OUTER if tier else LOADS if kind == "load" else STORES
        return most - self._load.get(_edge(kind, tier), 0)

    def begin(
        self, kind: TransferKind, done: Done, *, place: int, key: bytes, group: int, block: int, tier: int
    ) -> int:
        """Put a transfer into the next plan; `done` hears how it ended. The caller has looked at `credits`."""
        self._ids += 1
        edge = _edge(kind, tier)
        self._under_way[self._ids] = (edge, done)
        self._wanted.add(self._ids)
        self._load[edge] = self._load.get(edge, 0) + 1
        self._new_transfers.append(BlockTransfer(self._ids, kind, tier, group, block, place, key))
        return self._ids

    def cancel(self, transfer: int) -> None:
        """Stop waiting for a transfer; its `done` is called at its end all the same. Idempotent."""
        if transfer in self._wanted:
            self._wanted.remove(transfer)
            self._new_cancelled.append(transfer)

    def ask(self, tier: int, keys: tuple[bytes, ...], found: Found) -> int:
        """Ask an outer tier how many of these keys it has; `found` hears it, unless `forget_lookup` came before."""
        self._ids += 1
        self._lookups[self._ids] = found
        self._new_lookups.append(TierLookup(self._ids, tier, keys))
        return self._ids

    def forget_lookup(self, lookup: int) -> None:
        """Stop waiting for a look-up's answer. Idempotent."""
        if lookup in self._lookups:
            self._lookups[lookup] = self._too_late

    def take(self) -> tuple[tuple[BlockTransfer, ...], tuple[TierLookup, ...], tuple[int, ...]]:
        """The transfers, look-ups and cancellations that the next plan must name; each is named once.

        Stores come first: a leased block that is given away with this plan may be the target of one of its loads.
        """
        transfers = sorted(self._new_transfers, key=lambda transfer: transfer.kind != "store")
        said = tuple(transfers), tuple(self._new_lookups), tuple(self._new_cancelled)
        self._new_transfers.clear()
        self._new_lookups.clear()
        self._new_cancelled.clear()
        return said

    def take_in(self, transfers: tuple[TransferDone, ...], found: tuple[LookupDone, ...]) -> None:
        """Answers of the worker; those that name nothing are counted."""
        for answer in transfers:
            known = self._under_way.pop(answer.transfer, None)
            if known is None:
                self.num_late += 1
                continue
            edge, done = known
            self._load[edge] -= 1
            if answer.transfer in self._wanted:
                self._wanted.remove(answer.transfer)
            else:
                self.num_late += 1
            done(answer)
        for lookup in found:
            callback = self._lookups.pop(lookup.lookup, self._too_late)
            callback(lookup.count)

    def forget(self) -> None:
        """The worker is gone, and with it everything under way: none of it is answered."""
        self._under_way.clear()
        self._wanted.clear()
        self._lookups.clear()
        self._load.clear()
        self.take()

    def _too_late(self, count: int) -> None:
        self.num_late += 1

    def assert_invariants(self) -> None:
        counted: dict[Edge, int] = {}
        for edge, _ in self._under_way.values():
            counted[edge] = counted.get(edge, 0) + 1
        assert counted == {edge: load for edge, load in self._load.items() if load}, "a credit is lost"
        assert self._wanted <= self._under_way.keys(), "a transfer that has ended is wanted"


def _edge(kind: TransferKind, tier: int) -> Edge:
    return ("fetch", tier) if tier else (kind, 0)
