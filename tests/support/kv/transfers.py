"""Transfers asked of a worker or a transfer engine by hand, and waited for."""

import itertools
from collections.abc import Sequence

from troupellm.models.kv_offload.transfers import TransferEngine
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.messages.kv_transfers import (
    BlockTransfer,
    LookupDone,
    TierLookup,
    TierReport,
    TransferDone,
    TransferKind,
)
from troupellm.protocol.messages.worker import StepPlan

_numbers = itertools.count(1)


def move(
    kind: TransferKind, *, block: int = -1, place: int = 0, key: bytes = b"", tier: int = 0, group: int = 0
) -> BlockTransfer:
    """With a number of its own."""
    return BlockTransfer(next(_numbers), kind, tier, group, block, place, key)


def look(*keys: bytes, tier: int = 1) -> TierLookup:
    return TierLookup(next(_numbers), tier, keys)


def empty_plan(
    *transfers: BlockTransfer, lookups: Sequence[TierLookup] = (), cancelled: Sequence[int] = ()
) -> StepPlan:
    return StepPlan(
        step=0,
        engine_epoch=0,
        rows=(),
        epochs=(),
        starts=(),
        counts=(),
        transfers=transfers,
        lookups=tuple(lookups),
        cancelled=tuple(cancelled),
    )


class Driver:
    """Gives plans without rows until all that was asked for has been answered, as the scheduler does."""

    def __init__(self, worker: ModelWorker | TransferEngine) -> None:
        self._worker = worker
        self.done: dict[int, TransferDone] = {}
        self.found: dict[int, LookupDone] = {}
        self.tiers: dict[int, TierReport] = {}
        self.reports: list[TierReport] = []

    def step(self, *transfers: BlockTransfer, lookups: Sequence[TierLookup] = (), cancelled: Sequence[int] = ()) -> int:
        """One plan without rows; how many answers came with it. Each comes once."""
        plan = empty_plan(*transfers, lookups=lookups, cancelled=cancelled)
        if isinstance(self._worker, ModelWorker):
            return self.see(self._worker.collect(self._worker.launch(plan)))
        self._worker.begin(plan)
        return self.see(self._worker.collect(idle=True))

    def see(self, result: object) -> int:
        """Take the answers of a result."""
        done, found, tiers = result.transfers, result.found, result.tiers
        for answer in done:
            assert answer.transfer not in self.done, "answered twice"
            self.done[answer.transfer] = answer
        for answer in found:
            assert answer.lookup not in self.found, "answered twice"
            self.found[answer.lookup] = answer
        self.reports += tiers
        self.tiers |= {report.tier: report for report in tiers}
        return len(done) + len(found)

    def all(self, *transfers: BlockTransfer) -> list[TransferDone]:
        """Ask for these and wait; their answers."""
        self.step(*transfers)
        return self.wait(*transfers)

    def wait(self, *transfers: BlockTransfer) -> list[TransferDone]:
        """The answers of what was asked for."""
        while any(asked.transfer not in self.done for asked in transfers):
            self.step()
        return [self.done[asked.transfer] for asked in transfers]

    def ok(self, *transfers: BlockTransfer) -> None:
        assert [answer for answer in self.all(*transfers) if not answer.ok] == []

    def error(self, transfer: BlockTransfer) -> str:
        (answer,) = self.all(transfer)
        assert not answer.ok
        return answer.error

    def count(self, *keys: bytes, tier: int = 1) -> int:
        """How many of the keys a tier has."""
        asked = look(*keys, tier=tier)
        self.step(lookups=(asked,))
        while asked.lookup not in self.found:
            self.step()
        return self.found[asked.lookup].count

    def wait_for_report(self, tier: int, *, disabled: bool) -> TierReport:
        """Until a tier is disabled, or works again."""
        while tier not in self.tiers or bool(self.tiers[tier].disabled) is not disabled:
            self.step()
        return self.tiers[tier]
