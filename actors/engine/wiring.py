"""The shared parts that the actors are built from, and a factory for each actor."""

from collections.abc import Callable, Iterator
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Never

import msgspec

from troupellm.actors.adapters.actor import AdapterLibrary, AdapterSources, Prepare
from troupellm.actors.engine.edges import CONTROL_MARGIN, CONTROLS_PER_SEQUENCE, SUPERVISION, edges
from troupellm.actors.guide.actor import Guide
from troupellm.actors.guide.compiler import GuideCompiler
from troupellm.actors.input.actor import Intake
from troupellm.actors.kv_cache.events import KVEventLog
from troupellm.actors.output.actor import Output
from troupellm.actors.output.detokenizer import TextTables
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import Clock, Randomness, Threads
from troupellm.actors.scheduler.actor import Scheduler
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.worker.actor import WorkerActor
from troupellm.actors.worker.thread_host import WorkerHost
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.media.description import MediaModel
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.adapter_library import AdapterControl, AdapterMessage
from troupellm.protocol.messages.guide import GuideControl, GuideMessage
from troupellm.protocol.messages.input import IntakeMessage, PrepareRequest
from troupellm.protocol.messages.media import MediaAbility
from troupellm.protocol.messages.metrics import MetricsMessage
from troupellm.protocol.messages.output import OutputMessage, RequestClosed
from troupellm.protocol.messages.scheduler import AbortRequest, SchedulerControl, SchedulerMessage
from troupellm.protocol.messages.sleep import WorkerControl
from troupellm.protocol.messages.worker import StepPlan, WorkerReady
from troupellm.protocol.params.sampling import Limits

if TYPE_CHECKING:
    from troupellm.actors.media.actor import Media
    from troupellm.actors.media.preparer import MediaPreparer


class MediaParts(msgspec.Struct, frozen=True):
    """The parts of an engine whose model sees images."""

    model: MediaModel
    preparer: "MediaPreparer"
    ability: MediaAbility


class EngineParts(msgspec.Struct, frozen=True, kw_only=True):
    """The shared parts that the actors are built from."""

    config: EngineConfig
    ready: WorkerReady
    limits: Limits
    worker_host: WorkerHost
    """The worker's host, with the model loaded."""
    tokenizer: Tokenizer
    tables: TextTables
    chat_template: ChatTemplate
    compiler: GuideCompiler
    pool: Threads
    clock: Clock
    randomness: Randomness
    hash_key: bytes
    """Keys the hashes of the prefix cache."""
    adapters: AdapterSources | None = None
    """None: no adapters are served."""
    media: MediaParts | None = None
    """None: no images are taken."""


class Mailboxes:
    """One per actor, as the table of edges has it. They outlive the actors behind them."""

    def __init__(self, config: EngineConfig, *, sees: bool = False) -> None:
        """sees: the model sees images."""
        capacity: dict[str, int] = {}
        for edge in edges(config, sees=sees):
            capacity[edge.receiver] = capacity.get(edge.receiver, 0) + edge.capacity
        self.intake: Mailbox[IntakeMessage, Never] = Mailbox(
            "intake", capacity["intake"], turns_by=attrgetter("submission.tenant")
        )
        self.adapters: Mailbox[AdapterMessage, AdapterControl] | None = None
        """None where no adapters are served."""
        if config.lora.enabled:
            self.adapters = Mailbox("adapters", capacity["adapters"])
        self.media: Mailbox[PrepareRequest, AbortRequest] | None = None
        """None where no images are taken."""
        if sees:
            self.media = Mailbox("media", capacity["media"], turns_by=attrgetter("submission.tenant"))
        self.guide: Mailbox[GuideMessage, GuideControl] = Mailbox("guide", capacity["guide"])
        self.scheduler: Mailbox[SchedulerMessage, SchedulerControl] = Mailbox(
            "scheduler",
            capacity["scheduler"],
            control_capacity=CONTROLS_PER_SEQUENCE * capacity["scheduler"] + CONTROL_MARGIN,
        )
        self.worker: Mailbox[StepPlan, WorkerControl] = Mailbox("worker", capacity["worker"])
        self.output: Mailbox[OutputMessage, Never] = Mailbox("output", capacity["output"])
        self.metrics: Mailbox[MetricsMessage, Never] = Mailbox("metrics", capacity["metrics"])
        self.stalls: Mailbox[Never, Never] = Mailbox("stalls", 1)
        self.watchdog: Mailbox[Never, Never] = Mailbox("watchdog", 1)


class Builder:
    """Makes actors, as often as supervision wants."""

    def __init__(
        self,
        parts: EngineParts,
        boxes: Mailboxes,
        on_closed: Callable[[RequestClosed], None],
        kv_events: KVEventLog | None = None,
    ) -> None:
        """
        Args:
            on_closed: hears from the output actor of every request that ends.
            kv_events: hears from the scheduler what can be found in the prefix cache.
        """
        self._kv_events = kv_events
        self._on_closed = on_closed
        self._parts = parts
        self._boxes = boxes
        self._rows: Iterator[int] = count()

    @property
    def _caching(self) -> bool:
        """Where every token sees every other one, no part of a prompt serves another prompt."""
        return self._parts.config.cache.enable_prefix_caching and not self._parts.ready.whole_prompts

    def intake(self) -> Intake:
        parts, boxes = self._parts, self._boxes
        return Intake(
            boxes.intake,
            boxes.output,
            boxes.scheduler,
            boxes.guide,
            tokenizer=parts.tokenizer,
            chat_template=parts.chat_template,
            limits=parts.limits,
            ready=parts.ready,
            threads=parts.pool,
            clock=parts.clock,
            randomness=parts.randomness,
            rows=self._rows,
            hash_key=parts.hash_key if self._caching else None,
            media=None if parts.media is None else parts.media.model,
        )

    def media(self, inbox: Mailbox[PrepareRequest, AbortRequest], media: MediaParts) -> "Media":
        """Fetches and prepares images."""
        from troupellm.actors.media.actor import Media
        from troupellm.actors.media.fetch import Fetcher

        parts, boxes = self._parts, self._boxes
        return Media(
            inbox,
            boxes.intake,
            boxes.adapters,
            media.preparer,
            Fetcher(parts.config.media),
            parts.config.media,
            most_vectors=media.ability.cache_vectors,
            secret=parts.hash_key,
            threads=parts.pool,
            clock=parts.clock,
        )

    def guide(self) -> Guide:
        parts, boxes = self._parts, self._boxes
        return Guide(
            boxes.guide,
            boxes.output,
            boxes.scheduler,
            parts.compiler,
            parts.worker_host.prepare_guide,
            parts.config.guide,
            parts.clock,
            warm=parts.config.has_worker_process,
        )

    def adapters(
        self,
        inbox: Mailbox[AdapterMessage, AdapterControl],
        sources: AdapterSources,
        prepare: Prepare,
        engine_epoch: Callable[[], int],
    ) -> AdapterLibrary:
        """As of `AdapterLibrary`."""
        parts, boxes = self._parts, self._boxes
        return AdapterLibrary(
            inbox,
            boxes.intake,
            boxes.scheduler,
            sources,
            prepare=prepare,
            release=parts.worker_host.release_adapter,
            engine_epoch=engine_epoch,
            threads=parts.pool,
            clock=parts.clock,
        )

    def scheduler(self) -> Scheduler:
        parts, boxes = self._parts, self._boxes
        core = SchedulerCore(
            parts.config.scheduler,
            parts.ready,
            enable_prefix_caching=self._caching,
            hash_key=parts.hash_key,
            speculative=parts.config.speculation.speculative_config,
            kv_events=self._kv_events,
            offload=parts.config.offload,
            leases=parts.config.leases,
            builds_guides=True,
            lora=parts.config.lora,
        )
        return Scheduler(
            core, boxes.scheduler, boxes.worker, boxes.output, boxes.metrics, parts.clock, boxes.guide, boxes.adapters
        )

    def worker(self) -> WorkerActor:
        parts, boxes = self._parts, self._boxes
        timeout = parts.config.worker.step_deadline
        return WorkerActor(
            boxes.worker,
            boxes.scheduler,
            parts.worker_host,
            parts.clock,
            timeout,
            SUPERVISION["worker"].intensity,
        )

    def output(self) -> Output:
        parts, boxes = self._parts, self._boxes
        interval = parts.config.stream.flush_interval or 0.0
        return Output(
            boxes.output,
            parts.tables,
            boxes.scheduler.control,
            parts.clock,
            flush_interval=interval,
            wakes_per_second=parts.config.stream.wakes_per_second or 0.0,
            most_wakes_per_second=parts.config.stream.most_wakes_per_second or 0.0,
            on_closed=self._on_closed,
        )
