"""The oracle with tiers behind its cache: a worker whose transfers take a while, and fail as often as it is told.

It refuses a plan that uses a block that is still being loaded, and every plan that `ToyTiers` refuse.
"""

import random
from dataclasses import dataclass, field

import msgspec
from oracle import SECRET, Harness, Oracle, ready
from toy_tiers import Content, ToyTiers

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierInfo, TierLookup, TierReport
from troupellm.protocol.messages.worker import StepPlan, WorkerReady

ERRORS = ("miss", "corrupt", "busy", "disabled", "an I/O error")


class _ChancyTiers(ToyTiers):
    """Transfers end, and fail, as likely as the oracle says."""

    def __init__(self, oracle: "TierOracle") -> None:
        super().__init__(oracle)
        self._oracle = oracle
        self._random = oracle.random

    def ends(self, order: BlockTransfer) -> bool:
        return self._random.random() < self._oracle.speed

    def answers(self, lookup: TierLookup) -> bool:
        return self._random.random() < self._oracle.speed

    def error(self, order: BlockTransfer, *, cancelled: bool) -> str:
        if cancelled and self._random.random() < 0.5:  # else it had ended before it heard
            return "cancelled"
        return self._random.choice(ERRORS) if self._random.random() < self._oracle.failing else ""


@dataclass
class TierOracle(Oracle):
    seed: int = 0
    speed: float = 1.0
    """How likely a transfer ends with the plan that begins it, or with one of those that follow."""
    failing: float = 0.0
    """How likely it fails."""
    silent: bool = False
    """Nothing ends, and nothing is answered."""
    reports: list[TierReport] = field(default_factory=list)
    """The tier reports of the next result."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tiers = _ChancyTiers(self)

    def launch(self, plan: StepPlan) -> None:
        self.tiers.begin(plan)
        super().launch(plan)
        loading = self.tiers.loading()
        for row, start in zip(plan.rows, plan.starts, strict=True):
            for group, table in enumerate(self.rows[row].tables):  # it still has what has fallen behind a window
                seen = table[self._first_seen(group, start) // self.block_size :]
                assert loading.isdisjoint(seen), "a row is computed whose blocks are still being loaded"
        transfers, found = ((), ()) if self.silent else self.tiers.answer(wait=not plan.rows)
        reports, self.reports = tuple(self.reports), []
        result = msgspec.structs.replace(self.pending.pop(), transfers=transfers, found=found, tiers=reports)
        self.pending.append(result)

    def reset(self) -> None:
        super().reset()
        self.tiers.forget()

    def read_block(self, block: int) -> Content:
        return tuple(self.content.get(slot) for slot in self._slots(block))

    def write_block(self, block: int, content: Content | None) -> None:
        for slot, held in zip(self._slots(block), content or ((-1, ()),) * self.block_size, strict=True):
            self.content[slot] = held

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)


def tiered_ready(host_slots: int, outer: tuple[str, ...] = (), **sizes: object) -> WorkerReady:
    tiers = tuple(TierInfo(name=name) for name in outer)
    return msgspec.structs.replace(ready(**sizes), host_slots=host_slots, tiers=tiers)


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
        core = SchedulerCore(made, settings, enable_prefix_caching=True, hash_key=SECRET, offload=offload)
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
        assert not self.oracle.tiers.under_way
        assert not self.oracle.tiers.asked
