"""Health and facts. Probes read the state as it is: no mailbox, no blocks, no key, no log line."""

import msgspec

from troupellm.protocol.api.chat import LoadBody, ProbeReport, VersionBody, Welcome
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState

OLLAMA_GREETING = b"Ollama is running"
"""The text by which programs find an Ollama server."""


async def ready(host: ServerState, exchange: Exchange, _: None) -> None:
    """200 when requests should be routed here, else 503 (/readyz, /health, /ping). The reasons also name the replicas
    that are missing while others serve."""
    reasons = host.readiness()
    state = "not ready" if reasons else "ready"
    await _report(host, exchange, good=not reasons, state=state, reasons=[*reasons, *host.missing()])


async def live(host: ServerState, exchange: Exchange, _: None) -> None:
    """503 asks for a restart: the engine has failed for good."""
    alive = host.alive()
    reasons = [] if alive else [host.failure or "the engine has failed"]
    await _report(host, exchange, good=alive, state="alive" if alive else "failed", reasons=reasons)


async def started(host: ServerState, exchange: Exchange, _: None) -> None:
    """200 once the weights are loaded."""
    loaded = host.loaded()
    refusal = None if loaded else host.refusal()
    reasons = [refusal.message] if refusal else []
    await _report(host, exchange, good=loaded, state="started" if loaded else "starting", reasons=reasons)


async def welcome(host: ServerState, exchange: Exchange, _: None) -> None:
    """200 in every state of the server."""
    accepted = exchange.header(b"accept") or ""
    if host.config.ollama and "application/json" not in accepted:
        await exchange.respond(200, OLLAMA_GREETING, content_type=b"text/plain; charset=utf-8")
    else:
        await exchange.respond(200, msgspec.json.encode(Welcome()))


async def version(host: ServerState, exchange: Exchange, _: None) -> None:
    import troupellm

    await exchange.respond(200, msgspec.json.encode(VersionBody(troupellm.__version__)))


async def load(host: ServerState, exchange: Exchange, _: None) -> None:
    """Requests in flight, as vLLM's /load says it."""
    await exchange.respond(200, msgspec.json.encode(LoadBody(len(host.in_flight) + host.in_flight_elsewhere)))


async def metrics(host: ServerState, exchange: Exchange, _: None) -> None:
    """Prometheus text; gauges are read from live state now."""
    text = await host.metrics()
    await exchange.respond(200, text, content_type=b"text/plain; version=0.0.4; charset=utf-8")


async def _report(host: ServerState, exchange: Exchange, *, good: bool, state: str, reasons: list[str]) -> None:
    progress = host.progress if host.progress_fields() else None
    body = ProbeReport(status=state, reasons=reasons, progress=msgspec.UNSET if progress is None else progress)
    await exchange.respond(200 if good else 503, msgspec.json.encode(body), () if good else ((b"retry-after", b"1"),))
