"""Requests of adapters for a scheduler, and a worker that checks what its slots hold."""

from dataclasses import dataclass, field

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.messages.adapter_library import AdapterAsk, DropAdapter, ServeAdapter
from troupellm.protocol.messages.adapters import AdapterPreparation, AdapterRef
from troupellm.protocol.messages.scheduler import AdapterLoaded, SubmitRequest
from troupellm.protocol.messages.worker import NewRow, StepPlan, WorkerReady
from troupellm.tests.support.scheduler.oracle import Harness, Oracle, beam_submission, ready, submission

PROMPT = [1, 2, 3, 4, 5]
PREPARED = AdapterPreparation(outcome="prepared", num_bytes=1)


def adapter(name: str) -> AdapterRef:
    return AdapterRef(name, f"digest of {name}", f"/adapters/{name}")


@dataclass
class AdapterOracle(Oracle):
    """Refuses a plan whose slots hold something else than its rows need."""

    wanted: dict[str, str] = field(default_factory=dict)
    """Digests by request id; those of the base model are not in it."""
    host: set[str] = field(default_factory=set)
    slots: dict[int, str] = field(default_factory=dict)
    adapters: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slot and digest of each row."""
    blocks: dict[int, str] = field(default_factory=dict)
    """The adapter that a block's KV was computed with."""

    def launch(self, plan: StepPlan) -> None:
        for change in plan.adapters:
            assert change.digest in self.host, "a slot is to get an adapter that was not read"
            self.slots[change.slot] = change.digest
        super().launch(plan)

    def reset(self) -> None:
        super().reset()
        for held in (self.host, self.slots, self.adapters, self.blocks):
            held.clear()

    def _add(self, new: NewRow, start: int) -> None:
        digest = self.wanted.get(new.request_id, "")
        assert bool(digest) == bool(new.adapter), "a row has a slot and needs none, or needs one"
        self.adapters[new.row] = new.adapter, digest
        super()._add(new, start)
        for table in new.blocks:
            for block in table[: start // self.block_size]:
                assert self.blocks[block] == digest, "a cached block was computed with another adapter"

    def _compute(self, row: int, epoch: int, start: int, count: int) -> list[int]:
        slot, digest = self.adapters[row]
        assert self.slots.get(slot, "") == digest, "a row is computed with another adapter"
        for table in self.rows[row].tables:
            for position in range(start, start + count):
                self.blocks[table[position // self.block_size]] = digest
        return super()._compute(row, epoch, start, count)


class AdapterHarness(Harness):
    """Answers the scheduler's asks as the library does, unless `answers` is off."""

    def __init__(
        self,
        *,
        max_loras: int = 2,
        max_cpu_loras: int | None = None,
        settings: WorkerReady | None = None,
        caching: bool = False,
        **config: object,
    ) -> None:
        settings = settings or ready(max_loras=max_loras)
        lora = LoraConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
        config = {"max_plans_in_flight": 1} | config
        core = SchedulerCore(
            SchedulerConfig(**config), settings, enable_prefix_caching=caching, hash_key=b"k" * 32, lora=lora
        )
        super().__init__(core, settings, worker=AdapterOracle)
        self.answers = True
        self.asks: list[AdapterAsk] = []
        self.most_host = 0

    @property
    def worker(self) -> AdapterOracle:
        assert isinstance(self.oracle, AdapterOracle)
        return self.oracle

    def ask(self, request: int, name: str = "", *, rows: int = 1, beams: bool = False, **fields: object) -> None:
        """Submit a request of an adapter, or of the base model."""
        fields = {"arrival": self.now} | fields
        ref = adapter(name) if name else None
        make = beam_submission if beams else submission
        message: SubmitRequest = make(request, PROMPT, rows=rows, adapter=ref, **fields)
        if ref is not None:
            self.worker.wanted[message.request_id] = ref.digest
        self.submit(message)

    def step(self) -> bool:
        while self.plan() is not None or self._answered():
            pass
        if not self.oracle.pending:
            return False
        self.finish()
        return True

    def answer(
        self, asked: AdapterAsk, preparation: AdapterPreparation = PREPARED, *, epoch: int | None = None
    ) -> None:
        """As the library does."""
        if isinstance(asked, DropAdapter):
            self.worker.host.discard(asked.digest)
            return
        if preparation.outcome == "prepared":
            self.worker.host.add(asked.digest)
        epoch = self.core.engine_epoch if epoch is None else epoch
        self.core.adapter_loaded(AdapterLoaded(asked.digest, epoch, preparation))
        self._check()
        self.most_host = max(self.most_host, len(self.worker.host))
        self._drain()

    def take_asks(self) -> list[AdapterAsk]:
        assert self.core.adapters is not None
        asks = self.core.adapters.take_asks()
        self.asks += asks
        return asks

    def _answered(self) -> bool:
        if not self.answers:
            return False
        asks = self.take_asks()
        for asked in asks:
            self.answer(asked)
        return any(isinstance(asked, ServeAdapter) for asked in asks)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of adapters that run, and of those that wait."""
        snapshot = self.core.snapshot().adapters
        assert snapshot is not None
        return snapshot.running, snapshot.waiting
