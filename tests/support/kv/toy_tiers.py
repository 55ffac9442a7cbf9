"""Tiers behind a toy worker's cache: what lies in places and under keys, and transfers that take a while.

They keep the content of every place and every key, so they refuse an order that would store what is not whole, load
what is not there, or write to a place that is being read. When a transfer ends, and how, is for subclasses to say.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from troupellm.protocol.messages.kv_transfers import BlockTransfer, LookupDone, TierLookup, TransferDone
from troupellm.protocol.messages.worker import StepPlan

Content = tuple[object, ...]
"""The contents of each position of a block: (group, all tokens up to it in some form)."""


class Cache(Protocol):
    def read_block(self, block: int) -> Content: ...
    def write_block(self, block: int, content: Content | None) -> None:
        """None: rubbish."""


@dataclass
class Framed:
    """A block as an outer tier keeps it."""

    content: Content
    size: int
    checksum: int

    @classmethod
    def of(cls, content: Content) -> "Framed":
        return cls(content, len(content), _checksum(content))

    @property
    def whole(self) -> bool:
        return len(self.content) == self.size and _checksum(self.content) == self.checksum


@dataclass
class UnderWay:
    order: BlockTransfer
    content: Content | None = None
    """Of a store, read when it began."""


class ToyTiers:
    def __init__(self, cache: Cache, num_outer: int = 2) -> None:
        self._cache = cache
        self.host: dict[int, tuple[bytes, Content]] = {}
        self.outer: list[dict[bytes, Framed]] = [{} for _ in range(num_outer)]
        """By tier, from number 1 on."""
        self.under_way: list[UnderWay] = []
        self.asked: list[TierLookup] = []
        self.given_up: set[int] = set()
        """Of those under way, what a reset came upon."""
        self.cancelled: set[int] = set()
        """Of those under way."""
        self.counts: dict[str, int] = {}
        """Transfers that began, by kind."""
        self._copied: set[int] = set()
        """Blocks that the newest plan copies from or to."""

    def begin(self, plan: StepPlan) -> None:
        """Before anything of a plan is written."""
        loads = {order.block for order in plan.transfers if order.kind == "load"}
        assert loads.isdisjoint(self._copied), "a block is loaded that the plan before copies, perhaps still"
        self._copied = {block for copy in plan.copies for block in (copy.source, copy.target)}
        assert loads.isdisjoint(self._copied), "a block is loaded that its plan copies"
        for order in plan.transfers:
            self._begin(order)
        self.asked.extend(plan.lookups)
        known = {under_way.order.transfer for under_way in self.under_way}
        self.cancelled.update(known.intersection(plan.cancelled))  # others have ended in a plan that is not back yet
        loading = self.loading()
        assert loading.isdisjoint(copy.target for copy in plan.copies), "a copy goes to a block that is being loaded"

    def loading(self) -> set[int]:
        """Device blocks that are being written."""
        return {under_way.order.block for under_way in self.under_way if under_way.order.kind == "load"}

    def answer(self, *, wait: bool) -> tuple[tuple[TransferDone, ...], tuple[LookupDone, ...]]:
        """The answers that are ready by now. wait: something ends, if anything is under way."""
        ended = [under_way for under_way in self.under_way if self.ends(under_way.order)]
        found = [lookup for lookup in self.asked if self.answers(lookup)]
        if wait and not ended and not found:
            ended, found = self.under_way[:1], self.asked[:1]
        done = []
        for under_way in ended:
            self.under_way.remove(under_way)
            done.append(self._end(under_way))
        for lookup in found:
            self.asked.remove(lookup)
        return tuple(done), tuple(LookupDone(lookup.lookup, self.count(lookup)) for lookup in found)

    def forget(self) -> None:
        """The worker is another one: nothing is under way, and nothing in host memory."""
        self.host.clear()
        self.end_all()

    def end_all(self) -> None:
        self._copied.clear()
        self.under_way.clear()
        self.asked.clear()
        self.cancelled.clear()
        self.given_up.clear()

    # Methods for subclasses to override.

    def ends(self, order: BlockTransfer) -> bool:
        """Whether a transfer ends with this plan."""
        return True

    def answers(self, lookup: TierLookup) -> bool:
        return True

    def error(self, order: BlockTransfer, *, cancelled: bool) -> str:
        """Why a transfer fails that ends now; empty: it does not."""
        return "cancelled" if cancelled else ""

    def count(self, lookup: TierLookup) -> int:
        store = self.outer[lookup.tier - 1]
        return next((index for index, key in enumerate(lookup.keys) if key not in store), len(lookup.keys))

    # Inside.

    def _begin(self, order: BlockTransfer) -> None:
        self.counts[order.kind] = self.counts.get(order.kind, 0) + 1
        if order.kind == "reset":
            self.outer[order.tier - 1].clear()
            same_tier = [other.order for other in self.under_way if other.order.tier == order.tier]
            self.given_up.update(other.transfer for other in same_tier if other.kind != "reset")
            self.under_way.append(UnderWay(order))
            return
        same_place = [other.order for other in self.under_way if other.order.place == order.place]
        kinds = {order.kind, *(other.kind for other in same_place)}
        assert not same_place or kinds <= {"load", "spill"}, "a place is written while something else is under way"
        content = None
        if order.kind == "store":
            others = (other.order for other in self.under_way if other.order.block == order.block)
            assert all(other.kind == "store" for other in others), "a block is stored that is being loaded"
            content = self._cache.read_block(order.block)
            whole = all(isinstance(held, tuple) and held[0] == order.group for held in content)
            assert whole, f"block {order.block} is stored, which is not whole: {content}"
        self.under_way.append(UnderWay(order, content))

    def _end(self, under_way: UnderWay) -> TransferDone:
        order = under_way.order
        if order.kind in ("store", "fetch"):  # what is being written holds nothing until that has ended
            self.host.pop(order.place, None)
        cancelled = order.transfer in self.cancelled
        self.cancelled.discard(order.transfer)
        error = self.error(order, cancelled=cancelled)
        if order.transfer in self.given_up:
            self.given_up.remove(order.transfer)
            error = "cancelled"
        error = error or self._move(order, under_way.content)
        if not error:
            return TransferDone(order.transfer, True, seconds=0.001)
        if order.kind == "load":  # it was half written
            self._cache.write_block(order.block, None)
        return TransferDone(order.transfer, False, error)

    def _move(self, order: BlockTransfer, stored: Content | None) -> str:
        """Move a block; why that failed."""
        match order.kind:
            case "store":
                assert stored is not None
                self.host[order.place] = order.key, stored
            case "load":
                key, content = self._held(order)
                assert key == order.key, "a load names another block than lies in its place"
                self._cache.write_block(order.block, content)
            case "spill":
                self.outer[order.tier - 1][order.key] = Framed.of(self._held(order)[1])
            case "fetch":
                framed = self.outer[order.tier - 1].get(order.key)
                if framed is None:
                    return "miss"
                if not framed.whole:
                    del self.outer[order.tier - 1][order.key]
                    return "corrupt"
                self.host[order.place] = order.key, framed.content
        return ""

    def _held(self, order: BlockTransfer) -> tuple[bytes, Content]:
        assert order.place in self.host, f"a {order.kind} reads place {order.place}, which holds nothing"
        return self.host[order.place]


def _checksum(content: Iterable[object]) -> int:
    return zlib.crc32(repr(tuple(content)).encode())
