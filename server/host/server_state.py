"""The engine as the server sees it: perhaps loading, perhaps lent by a host application, perhaps draining."""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, cast

import anyio
import msgspec

from troupellm.actors.adapters.registry import not_served
from troupellm.actors.engine.engine import Engine
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.config.lora import is_adapter_name
from troupellm.protocol.errors import ModelNotFound
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.base.body_room import BodyRoom
from troupellm.server.base.errors import HttpError, not_ready
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.json_body import PARALLEL_DECODES
from troupellm.server.base.skipped import Skipped
from troupellm.server.host.admin_actions import AdminActions
from troupellm.server.host.background import Background
from troupellm.server.host.counting import Counting
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.volatile_lines import VolatileLines
from troupellm.server.observe.load_log import LoadLog
from troupellm.server.observe.metrics import UNMATCHED, HttpCounts
from troupellm.server.observe.vitals import Vitals
from troupellm.server.storage.batches_service import Batches
from troupellm.server.storage.message_threads import Limits, Threads
from troupellm.server.storage.responses import ResponseStore

STREAM_DEFAULTS = {
    "flush_interval": 0.02, "wakes_per_second": 1600, "most_wakes_per_second": 12_800, "stall_timeout": 60.0,
}  # fmt: skip
"""Defaults of an engine behind HTTP: a send costs the server some 40 us, so a few
streams see each token at once and take a tenth of a core at most, and more than 256 leave half of it to the steps. A
client that stops reading must not hold its blocks for ever."""
STEP_TIMEOUT = 60.0
"""Seconds. A step is bounded by its token budget, so a long prompt takes many steps and none of them long."""


def stream_defaults(given: Collection[str], api_processes: int = 0) -> dict[str, float]:
    """The settings to add to the given ones. An interval that the user set is kept as it is.

    Args:
        api_processes: those that share the sends.
    """
    chosen = {*given, "wakes_per_second", "most_wakes_per_second"} if "flush_interval" in given else given
    defaults = STREAM_DEFAULTS | {
        "most_wakes_per_second": STREAM_DEFAULTS["most_wakes_per_second"] * max(1, api_processes)
    }
    return {name: value for name, value in defaults.items() if name not in chosen}


def may_use(engine: ServedEngine, exchange: Exchange, model: str) -> bool:
    """Whether the key of a request may name a model."""
    for tenant in engine.config.scheduler.tenants:
        if tenant.name == exchange.key and tenant.models:
            return any(fnmatchcase(model, pattern) for pattern in tenant.models)
    return True


class ServerState:
    """Holds the engine (or why there is none yet) and the exchanges in flight."""

    def __init__(self, config: ServerConfig, engine: ServedEngine | None = None) -> None:
        self.config = config
        self.engine = engine
        self.loading = False
        self.draining = False
        self.failure: str | None = None
        """Client-safe reason why the engine could not start."""
        self.progress: LoadProgress | None = None
        self.load_log = LoadLog()
        self.vitals: Vitals | None = None
        """Of a process that is ours; a host application has its own."""
        self.counts = HttpCounts()
        self.skipped = Skipped()
        self.volatile_lines = VolatileLines.read(config.volatile_lines)
        self.bodies = BodyRoom(config.max_bodies_bytes, config.max_body_bytes)
        self.decodes = anyio.CapacityLimiter(PARALLEL_DECODES)
        self.in_flight_elsewhere = 0
        """Exchanges of other processes that serve the same engine."""
        self.reported_elsewhere = False
        """The engine's metrics hold what this process counts, and what others do."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when an exchange begins to use the engine, ceases to, or was answered."""
        self.in_flight: set[Exchange] = set()
        """Exchanges that use the engine; probes are not among them."""
        self.further_reasons: Callable[[], list[str]] = list
        """More reasons not to be ready."""
        self.missing: Callable[[], list[str]] = list
        """Replicas that do not serve, and why; requests are served while one is left."""
        self.counting = Counting()
        self.background = Background(config.max_background_responses)
        self.responses = ResponseStore(config)
        self.batches = Batches(config)
        self.threads = Threads()
        self.held_limits = Limits(config.max_body_bytes, config.body_timeout, self.decodes)
        self.administer: Callable[[str, bytes], Awaitable[bytes]] = AdminActions(config, self._own_engine).act
        """Carries out what an admin route asks: see `admin_actions.AdminActions.act`."""
        self.metrics: Callable[[], Awaitable[bytes]] = self._own_metrics
        """Prometheus' text format."""
        self.created = self.now()
        self._fingerprint: str | None = None
        self._idle: anyio.Event | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around the app's life: what outlives a request lives in it."""
        try:
            async with self.background.open():
                await self.responses.open()
                yield
        finally:
            await self.responses.close()
            await self.batches.close()

    def enter(self, exchange: Exchange) -> None:
        self.in_flight.add(exchange)
        self.on_change()

    def leave(self, exchange: Exchange) -> None:
        self.in_flight.discard(exchange)
        if not self.in_flight and self._idle is not None:
            self._idle.set()
        self.on_change()

    def answered(self, exchange: Exchange) -> None:
        """Count it."""
        self.counts.count(exchange.method, exchange.route or UNMATCHED, exchange.final_status)
        self.on_change()

    async def _own_metrics(self) -> bytes:
        """Prometheus' text format: the engine's, and what this process counts.

        Raises:
            HttpError: 503 with the reason.
        """
        text = await self.require().metrics(compat=self.config.metrics_compat == "vllm")
        text += await self.responses.metrics() + await self.batches.metrics() + self.threads.metrics()
        if self.reported_elsewhere:
            return text
        return text + self.counts.text(len(self.in_flight)) + (self.vitals.text() if self.vitals is not None else b"")

    def refuse(self) -> None:
        """Draining from now on: new requests are refused, also those whose body is still on its way."""
        self.draining = True
        for exchange in list(self.in_flight):
            exchange.reading.cancel()

    def cut(self) -> None:
        """End the exchanges that are in flight."""
        for exchange in list(self.in_flight):
            exchange.cancel_scope.cancel()

    async def idle(self) -> None:
        """Until no exchange is in flight."""
        while self.in_flight:
            self._idle = anyio.Event()
            await self._idle.wait()

    @staticmethod
    def now() -> int:
        """Epoch seconds, for `created`."""
        return int(time.time())

    def report(self, progress: LoadProgress) -> None:
        """The progress sink of an engine that is being loaded."""
        self.progress = progress
        self.load_log.report(progress)

    def require(self) -> ServedEngine:
        """The engine, if requests may use it now.

        Raises:
            HttpError: 503 with the reason.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        assert self.engine is not None
        return self.engine

    def refusal(self) -> HttpError | None:
        """Why no request can be served now; None when one can."""
        if self.draining:
            return not_ready("the server is shutting down", code="draining", close=True)
        if self.failure is not None:
            return not_ready(self.failure, code="engine_failed")
        if self.engine is None and not self.loading:
            message = (
                "the application that mounts this app never sent it lifespan.startup, so its engine was not started: "
                "open the engine yourself and mount asgi(engine)"
            )
            return not_ready(message, code="not_started")
        state = "starting" if self.engine is None else self.engine.state
        if state == "ready":
            return None
        if state == "starting":
            return not_ready(f"the model is loading{self._progress_text()}", code="starting")
        if state == "draining":
            return not_ready("the engine is shutting down", code="draining", close=True)
        return not_ready(f"the engine has {state}", code="engine_failed")

    def readiness(self) -> list[str]:
        """Reasons not to be sent requests; empty means ready. Reads state only."""
        refusal = self.refusal()
        if refusal is not None:
            return [refusal.message]
        engine = self.require()
        snapshot = engine.snapshot()
        scheduler, reasons = snapshot.scheduler, self.further_reasons()
        taken, deadline = snapshot.step_seconds, engine.config.worker.step_deadline
        if snapshot.unready is not None:
            reasons.append(f"engine_restarting: {snapshot.unready}")
        if snapshot.sleep_level is not None:
            reasons.append(f"the engine sleeps at level {snapshot.sleep_level}")
        elif snapshot.paused:
            reasons.append("the engine is paused")
        if deadline is not None and taken is not None and taken > deadline:  # idle time is no step
            reasons.append(f"no step has finished for {taken:.0f} seconds")
        if scheduler.waiting >= engine.config.scheduler.max_num_queued_reqs > 0:
            reasons.append("the waiting queue is full")
        return reasons

    def alive(self) -> bool:
        """False once the engine has failed for good."""
        return self.failure is None and (self.engine is None or self.engine.state not in ("failed", "stopped"))

    def loaded(self) -> bool:
        return self.engine is not None and self.engine.state in ("ready", "draining")

    def progress_fields(self) -> dict[str, Any] | None:
        """The fields that a refusal adds beside the error while the model loads."""
        if self.progress is None or self.loaded():
            return None
        return {"progress": msgspec.to_builtins(self.progress)}

    async def check_model(self, exchange: Exchange, name: str | None) -> str:
        """The name to report for a request that asks for `name`. Notes the adapter of that name, if it is one's.

        Raises:
            ModelNotFound: it is not served, or not to this key. A request that names none means the first name.
        """
        engine = self.require()
        names = engine.model_names
        wanted = names[0] if name is None else name
        if may_use(engine, exchange, wanted):
            if wanted in names:
                return wanted
            if engine.config.lora.enabled and is_adapter_name(wanted):
                with suppress(ModelNotFound):
                    exchange.adapter = (await engine.find_adapter(wanted)).name
                    return wanted
        known = [*names, *[info.name for info in await engine.list_adapters()]]
        raise not_served(wanted, [other for other in known if may_use(engine, exchange, other)])

    def fingerprint(self) -> str:
        """A stable name for what decides the tokens: version, model and number format."""
        if self._fingerprint is None:
            import troupellm

            engine = self.require()
            ready = engine.ready
            formats = (ready.dtype, ready.quantization, ready.cache_dtype)
            parts = (troupellm.__version__, *engine.model_names, *formats, ready.architecture)
            self._fingerprint = "troupe-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
        return self._fingerprint

    def _own_engine(self) -> Engine:
        return cast(Engine, self.require())  # in API processes others carry out what is asked

    def _progress_text(self) -> str:
        if self.progress is None:
            return ""
        share = f" {100 * self.progress.done // self.progress.total}%" if self.progress.total else ""
        return f" ({self.progress.phase}{share})"
