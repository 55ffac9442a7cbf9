"""The tiers behind a simulated cache: host memory and outer tiers, which fail, lie and dawdle when a fault goes off.

Time is counted in plans, because that is when a worker tells of its transfers.
"""

from random import Random
from typing import Protocol

from simulator.faults import HOST, Injector
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.messages.kv_transfers import BlockTransfer, LookupDone, TierLookup, TierReport, TransferDone
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.kv.toy_tiers import Cache, ToyTiers

_INWARD = ("load", "fetch")
_FULL = "no space left on device"


class Bystander(Protocol):
    """Operations on the engine while transfers are under way."""

    def leave(self, transfer: int) -> None:
        """The clients whose sequences wait for it go away."""

    def reset_cache(self) -> None: ...
    def nap(self) -> None: ...


class SimTiers(ToyTiers):
    def __init__(self, cache: Cache, random: Random, injector: Injector, outer: tuple[str, ...], speed: float) -> None:
        """speed: how likely a transfer ends with each plan."""
        super().__init__(cache, len(outer))
        self.bystander: Bystander | None = None
        self._random = random
        self._injector = injector
        self._names = (HOST, *outer)
        self._speed = speed
        self._due: dict[int, int] = {}
        """By transfer, in how many plans it ends."""
        self._late: set[int] = set()
        """They end successfully, long after the waiting sequences have left."""
        self._busy: set[int] = set()
        self._full: dict[int, int] = {}
        """By tier without space, plans until there is some."""
        self._disablings = [0] * len(self._names)
        self._reports: list[TierReport] = []

    def disturb(self) -> None:
        """A plan comes while transfers are under way: much can happen to them.

        Raises:
            WorkerGone: the worker was killed from outside.
        """
        for tier in sorted({under_way.order.tier for under_way in self.under_way}):
            strike, name = self._injector.strike, self._names[tier]
            if strike(name, "killed"):
                raise WorkerGone("somebody killed the worker", fault=False)
            if self.bystander is not None and strike(name, "reset"):
                self.bystander.reset_cache()
            if self.bystander is not None and strike(name, "sleep"):
                self.bystander.nap()

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        for order in plan.transfers:
            self._plan_end(order)
        for transfer in self._late & self.cancelled:
            self._due[transfer] = min(self._due[transfer], self._random.randint(3, 30))

    def answer_all(self) -> tuple[tuple[TransferDone, ...], tuple[LookupDone, ...], tuple[TierReport, ...]]:
        """The transfers and look-ups that have ended by now, and the tiers whose state has changed."""
        for transfer in self._due:
            self._due[transfer] -= 1
        waited_for = [order.order.transfer for order in self.under_way if order.order.transfer in self._late]
        for transfer in waited_for:
            if transfer not in self.cancelled and self.bystander is not None:
                self.bystander.leave(transfer)
        for tier in list(self._full):
            self._full[tier] -= 1
            if self._full[tier] <= 0:
                del self._full[tier]
                self._reports.append(TierReport(tier=tier, disablings=self._disablings[tier]))
        transfers, found = self.answer(wait=False)
        reports, self._reports = tuple(self._reports), []
        return transfers, found, reports

    def end_all(self) -> None:
        super().end_all()
        self._due.clear()
        self._late.clear()
        self._busy.clear()
        self._full.clear()  # a worker that has just come tries them all
        self._reports.clear()

    def fall_asleep(self, *, keeps_host: bool) -> None:
        self.end_all()
        if not keeps_host:
            self.host.clear()

    def ends(self, order: BlockTransfer) -> bool:
        if self._due[order.transfer] > 0:
            return False
        del self._due[order.transfer]
        return True

    def answers(self, lookup: TierLookup) -> bool:
        return self._random.random() < self._speed

    def count(self, lookup: TierLookup) -> int:
        if lookup.tier in self._full:
            return 0
        there = super().count(lookup)
        if there < len(lookup.keys) and self._injector.strike(self._names[lookup.tier], "lies"):
            return len(lookup.keys)
        return there

    def error(self, order: BlockTransfer, *, cancelled: bool) -> str:
        transfer, tier, strike = order.transfer, order.tier, self._injector.strike
        name = self._names[tier]
        late = transfer in self._late
        self._late.discard(transfer)
        if transfer in self._busy:
            self._busy.remove(transfer)
            return "busy"
        if cancelled and not late and self._random.random() < 0.5:
            return "cancelled"
        if tier in self._full:
            return "disabled"
        if strike(name, "load_error" if order.kind in _INWARD else "store_error"):
            return "an I/O error"
        if order.kind == "spill" and strike(name, "full"):
            self._full[tier] = self._random.randint(3, 40)
            self._disablings[tier] += 1
            self._reports.append(TierReport(tier=tier, disabled=_FULL, disablings=self._disablings[tier]))
            return _FULL
        if order.kind == "fetch":
            self._damage(order, name)
        if cancelled and late and not self._injector.calm:
            self._injector.hits[name, "late"] += 1
        return ""

    def _plan_end(self, order: BlockTransfer) -> None:
        """When it will be over."""
        random, strike, name = self._random, self._injector.strike, self._names[order.tier]
        due = 1
        while random.random() > self._speed and due < 40:
            due += 1
        if strike(name, "slow"):
            due += random.choice((5, 20, 100))
        if strike(name, "busy"):
            self._busy.add(order.transfer)
            due = 1
        elif order.kind in _INWARD and strike(name, "late"):
            self._injector.hits[name, "late"] -= 1  # counted when it has ended
            self._late.add(order.transfer)
            due = 60
        self._due[order.transfer] = due

    def _damage(self, order: BlockTransfer, name: str) -> None:
        """Damage that a disk or a peer may have done to a block since it was stored."""
        store, strike = self.outer[order.tier - 1], self._injector.strike
        framed = store.get(order.key)
        if framed is None:
            return
        if strike(name, "missing"):
            del store[order.key]
        elif strike(name, "short"):
            framed.content = framed.content[:-1]
        elif strike(name, "corrupt"):
            framed.content = (*framed.content[:-1], (-2, self._random.getrandbits(32)))
