"""The oracle with tiers behind its cache: a worker whose transfers take a while, and fail when they are told to.

It keeps the content of every place and every key, so it refuses a plan that would load what is not there, use a block
that is still being loaded, or write to a place that is being read.
"""

import random
from dataclasses import dataclass, field

import msgspec
from oracle import SECRET, Harness, Oracle, ready

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config import SchedulerConfig
from troupellm.protocol.offload import OffloadConfig
from troupellm.protocol.transfers import BlockTransfer, LookupDone, TierInfo, TierLookup, TierReport, TransferDone
from troupellm.protocol.worker import StepPlan, StepResult, WorkerReady

Content = tuple[object, ...]
"""What each position of a block holds."""
ERRORS = ("miss", "corrupt", "busy", "disabled", "an I/O error")


@dataclass
class _UnderWay:
    order: BlockTransfer
    content: Content | None = None
    """Of a store, read when it began."""


@dataclass
class TierOracle(Oracle):
    seed: int = 0
    speed: float = 1.0
    """How likely a transfer ends with the plan that begins it, or with one of those that follow."""
    failing: float = 0.0
    """How likely it fails."""
    silent: bool = False
    """Look-ups and transfers are not answered."""
    host: dict[int, tuple[bytes, Content]] = field(default_factory=dict)
    outer: list[dict[bytes, Content]] = field(default_factory=lambda: [{}, {}])
    """By tier, from number 1 on."""
    under_way: list[_UnderWay] = field(default_factory=list)
    asked: list[TierLookup] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    reports: list[TierReport] = field(default_factory=list)
    """To be told with the next result."""
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def launch(self, plan: StepPlan) -> None:
        for order in plan.transfers:
            self._begin(order)
        self.asked.extend(plan.lookups)
        known = {under_way.order.transfer for under_way in self.under_way}
        self.cancelled.update(known.intersection(plan.cancelled))  # others have ended in a plan that is not back yet
        loading = {under_way.order.block for under_way in self.under_way if under_way.order.kind == "load"}
        assert loading.isdisjoint(copy.target for copy in plan.copies), "a copy goes to a block that is being loaded"
        super().launch(plan)
        for row, start in zip(plan.rows, plan.starts, strict=True):
            for group, table in enumerate(self.rows[row].tables):  # it still has what has fallen behind a window
                seen = table[self._first_seen(group, start) // self.block_size :]
                assert loading.isdisjoint(seen), "a row is computed whose blocks are still being loaded"
        result = self.pending.pop()
        self.pending.append(self._answered(result, wait=not plan.rows))

    def reset(self) -> None:
        super().reset()
        self.host.clear()
        self.forget_transfers()

    def forget_transfers(self) -> None:
        self.under_way.clear()
        self.asked.clear()
        self.cancelled.clear()

    def _begin(self, order: BlockTransfer) -> None:
        self.counts[order.kind] = self.counts.get(order.kind, 0) + 1
        same_place = [other.order for other in self.under_way if other.order.place == order.place]
        kinds = {order.kind, *(other.kind for other in same_place)}
        assert not same_place or kinds <= {"load", "spill"}, "a place is written while something else is under way"
        content = None
        if order.kind == "store":
            assert all(other.order.block != order.block or other.order.kind == "store" for other in self.under_way)
            content = tuple(self.content.get(slot) for slot in self._slots(order.block))
            assert all(held is not None and held[0] == order.group for held in content), "an empty block is stored"
        self.under_way.append(_UnderWay(order, content))

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _answered(self, result: StepResult, *, wait: bool) -> StepResult:
        """With what has ended by now."""
        if self.silent:
            return result
        ended = [under_way for under_way in self.under_way if self.random.random() < self.speed]
        found = [lookup for lookup in self.asked if self.random.random() < self.speed]
        if wait and not ended and not found:
            ended, found = self.under_way[:1], self.asked[:1]
        done = []
        for under_way in ended:
            self.under_way.remove(under_way)
            done.append(self._end(under_way))
        for lookup in found:
            self.asked.remove(lookup)
        reports, self.reports = tuple(self.reports), []
        answers = [LookupDone(lookup.lookup, self._count(lookup)) for lookup in found]
        return msgspec.structs.replace(result, transfers=tuple(done), found=tuple(answers), tiers=reports)

    def _count(self, lookup: TierLookup) -> int:
        store = self.outer[lookup.tier - 1]
        return next((index for index, key in enumerate(lookup.keys) if key not in store), len(lookup.keys))

    def _end(self, under_way: _UnderWay) -> TransferDone:
        order = under_way.order
        self.host_is_void(order)
        if order.transfer in self.cancelled:
            self.cancelled.remove(order.transfer)
            if self.random.random() < 0.5:  # else it had ended before it heard
                return self._fail(order, "cancelled")
        if self.random.random() < self.failing:
            return self._fail(order, self.random.choice(ERRORS))
        match order.kind:
            case "store":
                assert under_way.content is not None
                self.host[order.place] = order.key, under_way.content
            case "load":
                key, content = self.host[order.place]
                assert key in (b"", order.key), "a load names another block than lies in its place"
                for slot, held in zip(self._slots(order.block), content, strict=True):
                    self.content[slot] = held
            case "spill":
                self.outer[order.tier - 1][order.key] = self.host[order.place][1]
            case "fetch":
                content = self.outer[order.tier - 1].get(order.key)
                if content is None:
                    return self._fail(order, "miss")
                self.host[order.place] = b"", content  # outer tiers may know it by another name
        return TransferDone(order.transfer, True, seconds=0.001)

    def host_is_void(self, order: BlockTransfer) -> None:
        """What is being written holds nothing until that has ended."""
        if order.kind in ("store", "fetch"):
            self.host.pop(order.place, None)

    def _fail(self, order: BlockTransfer, error: str) -> TransferDone:
        if order.kind == "load":  # it was half written
            for slot in self._slots(order.block):
                self.content[slot] = (-1, ())
        return TransferDone(order.transfer, False, error)


def tiered_ready(host_places: int, outer: tuple[str, ...] = (), **sizes: object) -> WorkerReady:
    tiers = tuple(TierInfo(name=name) for name in outer)
    return msgspec.structs.replace(ready(**sizes), host_places=host_places, tiers=tiers)


class TierHarness(Harness):
    """`tiers` are settings of the oracle's transfers."""

    def __init__(
        self,
        settings: WorkerReady,
        offload: OffloadConfig | None = None,
        config: dict[str, object] | None = None,
        burst: int = 1,
        **tiers: object,
    ) -> None:
        made = SchedulerConfig(**({"max_plans_in_flight": 1} | (config or {})))
        offload = offload or OffloadConfig(kv_offloading_size=1.0)
        core = SchedulerCore(
            made, settings, enable_prefix_caching=True, hash_key=SECRET, offload=offload, life=b"a life of the tests"
        )
        super().__init__(core, settings)
        windows = tuple(group.sliding_window for group in settings.groups)
        self.oracle: TierOracle = TierOracle(settings.block_size, settings.num_blocks, windows, burst=burst, **tiers)

    @property
    def offload(self) -> object:
        return self.core.snapshot().offload

    def assert_idle(self) -> None:
        super().assert_idle()
        shown = self.core.snapshot().offload
        assert (shown.loading, shown.transfers, shown.lookups, shown.waiting_spills) == (0, 0, 0, 0)
        assert not self.oracle.under_way
        assert not self.oracle.asked
