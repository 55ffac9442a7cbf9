"""The load of the engine in a header of the answer, as ORCA has it and vLLM sends it: for balancers that ask for it."""

import msgspec

from troupellm.server.base.exchange import Exchange
from troupellm.server.base.skipped import skipped_names
from troupellm.server.host.server_state import ServerState

ASKED = b"endpoint-load-metrics-format"
TOLD = b"endpoint-load-metrics"


def report_load(host: ServerState, exchange: Exchange) -> None:
    """Add the header that a request asks for, before its answer begins. Another format than TEXT and JSON is named in
    the header of what was passed over."""
    wanted = exchange.header(ASKED)
    if wanted is None:
        return
    scheduler = host.require().snapshot().scheduler
    numbers = {
        "kv_cache_usage_perc": round(scheduler.blocks_used / max(scheduler.blocks_total, 1), 4),
        "num_requests_waiting": scheduler.waiting,
    }
    if wanted.lower() == "text":
        told = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
    elif wanted.lower() == "json":
        told = "JSON " + msgspec.json.encode({"named_metrics": numbers}).decode()
    else:
        host.skipped.report(exchange, skipped_names("format", [wanted]))
        return
    exchange.further_headers = (*exchange.further_headers, (TOLD, told.encode()))
