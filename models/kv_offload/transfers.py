"""The worker's side of KV offload: starts the transfers and lookups of plans, and collects their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from troupellm.models.batch.row_table import PlanError
from troupellm.models.kv_offload.block_copy import BlockMover
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.host_tier import HostTier
from troupellm.models.kv_offload.operations import Operations, Stage
from troupellm.models.kv_offload.store import BlockStore
from troupellm.models.kv_offload.store_tier import OuterTier
from troupellm.protocol.config.kv_offload import HOST_TIER
from troupellm.protocol.messages.kv_transfers import BlockTransfer, LookupDone, TierReport, TransferDone
from troupellm.protocol.messages.sleep import EMPTY
from troupellm.protocol.messages.worker import StepPlan, StepResult, WorkerReady

IDLE_SECONDS = 0.005
"""Longest wait of a plan without rows for transfers: a new request's plan waits behind it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers that a step's result carries about transfers."""

    transfers: tuple[TransferDone, ...] = ()
    found: tuple[LookupDone, ...] = ()
    tiers: tuple[TierReport, ...] = ()


NOTHING = Outcome()


class TransferEngine:
    """Owns the host buffer, the tiers and their threads. Methods are called on the step's thread; none of them waits
    for a store, and a step waits for copies only where it writes to a block that a store is still to read."""

    def __init__(
        self,
        mover: BlockMover,
        host_buffer: HostBuffer,
        stores: Sequence[BlockStore],
        *,
        num_blocks: int,
        timeout: float,
    ) -> None:
        """
        Args:
            stores: outer tiers 1, 2 and so on; closed with the engine.
            num_blocks: that plans may name.
            timeout: seconds that one operation of an outer tier may take.
        """
        self._host_buffer, self._num_blocks = host_buffer, num_blocks
        self._operations = Operations()
        self._host = HostTier(mover, host_buffer, self._operations)
        self._tiers = [
            OuterTier(number + 1, store, host_buffer, self._operations, timeout) for number, store in enumerate(stores)
        ]
        self._reported: dict[int, TierReport] = {}
        self._changed = True
        for tier in self._tiers:
            tier.start()

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Add the tiers' properties for the scheduler."""
        tiers = tuple(tier.info() for tier in self._tiers)
        return msgspec.structs.replace(ready, host_slots=self._host_buffer.places, tiers=tiers)

    def reported(self, result: StepResult, *, idle: bool) -> StepResult:
        """Add the operations that have ended; see `collect`."""
        outcome = self.collect(idle=idle)
        if outcome is NOTHING:
            return result
        return msgspec.structs.replace(result, transfers=outcome.transfers, found=outcome.found, tiers=outcome.tiers)

    def begin(self, plan: StepPlan, before_loads: Callable[[set[int]], None] | None = None) -> None:
        """Before anything of a plan is written to the cache.

        Args:
            before_loads: called with the blocks that are about to be loaded.

        Raises:
            PlanError: it names a tier, place, block or number that it may not; nothing was begun.
        """
        if plan.transfers or plan.lookups:
            self._begin(plan, before_loads)
        elif self._host.is_storing:
            self._host.settle(_named(plan))
        if plan.cancelled:  # the plan itself may begin some of them, if their request ended before it was made
            self._cancel(plan.cancelled)

    def _begin(self, plan: StepPlan, before_loads: Callable[[set[int]], None] | None) -> None:
        self._check(plan)
        self._changed = True
        stores, loads, outer = self._admitted(plan)
        if stores:
            self._host.submit_stores(stores)
        targets = {asked.block for asked in loads}
        self._host.settle(_named(plan) | targets)
        if before_loads is not None and targets:
            before_loads(targets)
        if loads:
            self._host.submit_loads(loads)
        for transfer in outer:
            self._tiers[transfer.tier - 1].submit(transfer)
        for lookup in plan.lookups:
            self._tiers[lookup.tier - 1].submit(lookup)

    def settle(self) -> None:
        """Wait until no store is still to read a block."""
        self._host.settle(None)

    def collect(self, *, idle: bool) -> Outcome:
        """The operations that have ended since the last call.

        Args:
            idle: the step has nothing to compute, so wait a short while for operations under way.
        """
        for tier in self._tiers:
            tier.watch()
        if idle and not self._operations.idle:
            self._operations.wait(IDLE_SECONDS)
            for tier in self._tiers:
                tier.watch()
        transfers, found = self._operations.take()
        if transfers or found:
            self._changed = True
        tiers = self._reports()
        return Outcome(transfers, found, tiers) if transfers or found or tiers else NOTHING

    def loading(self) -> set[int]:
        """Blocks that are being loaded."""
        return self._operations.loading()

    def rest(self) -> None:
        """Give up everything that is under way; the answers say so. The cache is let go of, until `attach`."""
        self._host.rest()
        for tier in self._tiers:
            tier.rest()

    def forget(self) -> None:
        """`rest`, and discard the open answers: their scheduler is gone. The host tier counts as empty."""
        self.rest()
        self._operations.take()

    def attach(self, make_mover: Callable[[HostBuffer], BlockMover]) -> None:
        """Go on with another cache of the same layout, after `rest`."""
        self._host_buffer.reserve()
        self._host.attach(make_mover(self._host_buffer))
        self._reported.clear()
        self._changed = True

    def sleep(self, level: int) -> None:
        """`rest`; and at the level at which the weights go, the host buffer's memory goes with them, until `attach`."""
        self.rest()
        if level >= EMPTY:
            self._host_buffer.release()

    def close(self) -> None:
        """Join all threads; close the stores."""
        self._host.close()
        for tier in self._tiers:
            tier.close()
        self._host_buffer.release()

    def _cancel(self, transfers: Sequence[int]) -> None:
        operations = self._operations
        with operations.lock:
            for transfer in transfers:
                operation = operations.find(transfer)  # None: it is over
                if operation is not None and operation.stage is not Stage.LANDING:
                    operations.answer(operation, error="cancelled")

    def _admitted(self, plan: StepPlan) -> tuple[list[BlockTransfer], list[BlockTransfer], list[BlockTransfer]]:
        """Submit stores, loads, and operations of outer tiers; those that the host tier has no room for are refused."""
        stores, loads, outer = list[BlockTransfer](), list[BlockTransfer](), list[BlockTransfer]()
        room = self._host.room()
        for asked in plan.transfers:
            if asked.tier != HOST_TIER:
                outer.append(asked)
            elif room > 0:
                room -= 1
                (stores if asked.kind == "store" else loads).append(asked)
            else:
                self._host.refuse(asked)
        return stores, loads, outer

    def _check(self, plan: StepPlan) -> None:
        transfers, lookups = self._operations.numbers()
        for asked in plan.transfers:
            is_host = asked.kind in ("store", "load")
            if is_host != (asked.tier == HOST_TIER) or not 0 <= asked.tier <= len(self._tiers):
                raise PlanError(f"transfer {asked.transfer}: there is no {asked.kind} with tier {asked.tier}")
            if asked.kind != "reset" and not 0 <= asked.place < self._host_buffer.places:
                raise PlanError(
                    f"transfer {asked.transfer}: place {asked.place} of {self._host_buffer.places} was named"
                )
            if is_host and not 0 <= asked.block < self._num_blocks:
                raise PlanError(f"transfer {asked.transfer}: block {asked.block} of {self._num_blocks} was named")
            if asked.transfer in transfers:
                raise PlanError(f"transfer {asked.transfer} is under way already")
            transfers.add(asked.transfer)
        for lookup in plan.lookups:
            if not 0 < lookup.tier <= len(self._tiers):
                raise PlanError(f"lookup {lookup.lookup}: there is no outer tier {lookup.tier}")
            if lookup.lookup in lookups:
                raise PlanError(f"lookup {lookup.lookup} is under way already")
            lookups.add(lookup.lookup)

    def _reports(self) -> tuple[TierReport, ...]:
        """Reports of the tiers that have changed since their last report."""
        for tier in self._tiers:
            self._changed |= tier.has_changed()
        if not self._changed:
            return ()
        self._changed = False
        changed = []
        for report in (self._host.report(), *(tier.report() for tier in self._tiers)):
            if self._reported.get(report.tier) != report:
                self._reported[report.tier] = report
                changed.append(report)
        return tuple(changed)


def _named(plan: StepPlan) -> set[int]:
    """Blocks that the plan gives to rows, or copies to: those that may be written to and were not before."""
    named: set[int] = set()
    for new in plan.new_rows:
        named.update(*new.blocks)
    for change in plan.changes:
        named.update(*change.appended_blocks)
    named.update(copy.target for copy in plan.copies)
    return named
