"""Reports of a running server: the statistics line, and how late its event loop is."""

import logging
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.actors.metrics.families import counter, families, gauge, text_of
from troupellm.actors.replicas.fleet import Fleet
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.server.base.body_room import BodyRoom
from troupellm.server.http.connection_limit import ConnectionLimit
from troupellm.server.observe import logs

logger = logging.getLogger("troupellm.server")

TICK_SECONDS = 0.05
WINDOW_SECONDS = 10.0
"""The gauge shows the worst lateness of this window and the one before it, so no scrape misses a hold-up."""
ALARM_PAUSE_SECONDS = 10.0
"""At most one alarm line in this time."""


class LoopLag:
    """Measures how late a timer of the event loop is called."""

    def __init__(self, alarm: float) -> None:
        """`alarm`: seconds of lateness that are worth a line; 0 never tells."""
        self._alarm = alarm
        self._current = self._previous = 0.0
        self._window_ends = time.monotonic() + WINDOW_SECONDS
        self._silent_until = 0.0

    @property
    def worst(self) -> float:
        """Seconds, within the last one to two windows."""
        return max(self._current, self._previous)

    def note(self, lag: float, now: float) -> None:
        if now >= self._window_ends:
            self._previous, self._current = self._current, 0.0
            self._window_ends = now + WINDOW_SECONDS
        self._current = max(self._current, lag)
        if self._alarm and lag >= self._alarm and now >= self._silent_until:
            self._silent_until = now + ALARM_PAUSE_SECONDS
            fields = {"loop_lag_seconds": round(lag, 3)}
            logger.warning("the event loop was held up for %.1f seconds", lag, extra={"fields": fields})

    async def run(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await anyio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.note(max(0.0, now - due), now)


class StatsLine:
    """Rates since the last line; silent while there is no work."""

    def __init__(self, first: EngineSnapshot) -> None:
        self._last = first
        self._at = time.monotonic()
        self._reported_work = False

    def line(self, snapshot: EngineSnapshot, now: float) -> tuple[str, dict[str, float]] | None:
        """Text and fields; None when there is none to tell. The first idle interval after work still gets a line."""
        last, seconds = self._last, max(now - self._at, 1e-9)
        self._last, self._at = snapshot, now
        was, here = last.scheduler, snapshot.scheduler
        # Sums over replicas fall when one of them restarts.
        prompt = max(0, snapshot.prompt_tokens_computed - last.prompt_tokens_computed)
        generated = max(0, here.tokens_generated - was.tokens_generated)
        working = bool(prompt or generated or here.running or here.waiting)
        if not (working or self._reported_work):
            return None
        self._reported_work = working
        queries, hits = here.prefix_queries - was.prefix_queries, here.prefix_hits - was.prefix_hits
        fields = {
            "prompt_tokens_per_second": round(prompt / seconds, 1),
            "generation_tokens_per_second": round(generated / seconds, 1),
            "running": here.running,
            "waiting": here.waiting,
            "kv_cache_usage": round(here.blocks_used / max(here.blocks_total, 1), 4),
            "prefix_cache_hit_rate": round(hits / queries, 4) if queries else 0.0,
        }
        text = (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {here.running} reqs, Waiting: {here.waiting} reqs, "
            f"KV cache usage: {100 * fields['kv_cache_usage']:.1f}%, "
            f"Prefix cache hit rate: {100 * fields['prefix_cache_hit_rate']:.1f}%"
        )
        if here.offload is not None and was.offload is not None:
            asked = here.offload.queried_tokens - was.offload.queried_tokens
            found = here.offload.hit_tokens - was.offload.hit_tokens
            rate = fields["external_prefix_cache_hit_rate"] = round(found / asked, 4) if asked else 0.0
            text += f", External prefix cache hit rate: {100 * rate:.1f}%"
            disabled = [tier.name for tier in here.offload.tiers if tier.disabled]
            if disabled:
                text += f", KV tiers left alone: {', '.join(disabled)}"
        drafts, drafted = here.drafts - was.drafts, here.draft_tokens - was.draft_tokens
        if drafts and drafted:
            accepted = here.accepted_draft_tokens - was.accepted_draft_tokens
            fields["acceptance_length"] = round(1 + accepted / drafts, 2)
            fields["draft_acceptance_rate"] = round(accepted / drafted, 4)
            fields["draft_tokens_per_second"] = round(drafted / seconds, 1)
            text += (
                f", Mean acceptance length: {1 + accepted / drafts:.2f}, "
                f"Draft acceptance rate: {100 * accepted / drafted:.1f}% of {drafted / seconds:.1f} drafts/s"
            )
        return text, fields


async def log_stats(engine: Engine | Fleet, interval: float) -> None:
    """A line every `interval` seconds in which there was work."""
    stats = StatsLine(engine.snapshot())
    while True:
        await anyio.sleep(interval)
        summary = stats.line(engine.snapshot(), time.monotonic())
        if summary is not None:
            text, fields = summary
            logs.stats.info(text, extra={"fields": fields})


class VitalSigns(msgspec.Struct, frozen=True):
    """Of one process."""

    loop_lag: float
    """Seconds; worst lateness of the event loop lately."""
    log_lines_dropped: int | None
    """None where the process has logging of its own."""
    tasks: int = 0
    """Of its event loop."""
    connections: int | None = None
    """None where the process takes none."""
    connections_dropped: int = 0
    """Closed to make room for others, or because there was none."""
    body_bytes: int = 0
    """Of request bodies that are worked on, and of room that is kept for those that are read."""
    bodies_waiting: int = 0
    """Request bodies that wait for room."""
    template_processes: int = 0
    """That render chat templates, idle ones among them."""


def _of_each(attribute: str, beside: str = "") -> Callable[[Mapping[str, VitalSigns]], dict[str, float] | None]:
    """Values by process, of processes where both attributes are there; None if there are none."""

    def values(signs: Mapping[str, VitalSigns]) -> dict[str, float] | None:
        there = [process for process, its in signs.items() if getattr(its, beside or attribute) is not None]
        return {process: getattr(signs[process], attribute) for process in there} or None

    return values


_FAMILIES = (
    gauge("loop_lag_seconds", "Worst lateness of the event loop in the last seconds.", _of_each("loop_lag"), "process"),
    gauge("tasks", "Tasks of the event loop.", _of_each("tasks"), "process"),
    gauge("template_processes", "Processes that render chat templates.", _of_each("template_processes"), "process"),
    counter("log_lines_dropped", "Log lines never written.", _of_each("log_lines_dropped"), "process"),
    gauge("http_connections", "Open connections.", _of_each("connections"), "process"),
    counter("http_connections_dropped", "Connections closed because there were too many.",
            _of_each("connections_dropped", beside="connections"), "process"),
    gauge("http_body_bytes", "Request bodies that are worked on.", _of_each("body_bytes", beside="connections"),
          "process"),
    gauge("http_bodies_waiting", "Bodies that wait for room.", _of_each("bodies_waiting", beside="connections"),
          "process"),
)  # fmt: skip


class Vitals:
    """The process's own metrics, for `/metrics`."""

    def __init__(self, lag_alarm: float, process: str = "server") -> None:
        self.lag = LoopLag(lag_alarm)
        self._process = process
        self.connections: ConnectionLimit | None = None
        """Of the process's listener."""
        self.bodies: BodyRoom | None = None
        """Of the process's requests."""
        self.count_templates: Callable[[], int] = int
        """How many processes render chat templates for this one."""

    @property
    def signs(self) -> VitalSigns:
        """Only on the event loop."""
        signs = VitalSigns(
            self.lag.worst,
            logs.dropped(),
            len(anyio.get_running_tasks()),
            template_processes=self.count_templates(),
            body_bytes=0 if self.bodies is None else self.bodies.num_bytes,
            bodies_waiting=0 if self.bodies is None else self.bodies.num_waiting,
        )
        if self.connections is None:
            return signs
        return msgspec.structs.replace(
            signs, connections=len(self.connections), connections_dropped=self.connections.dropped
        )

    def text(self, others: Mapping[str, VitalSigns] | None = None) -> bytes:
        """Prometheus' text format, together with other processes by their names."""
        return text_of(families(_FAMILIES, {self._process: self.signs, **(others or {})}))
