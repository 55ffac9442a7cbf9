"""Headers of load balancers, as vLLM has them: the replica that a request is pinned to, and the load of the engine in
the answer, in the form of ORCA.
"""

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.skipped import skipped_names
from troupellm.server.host.server_state import ServerState

REPLICA = b"x-data-parallel-rank"
_MOST_DIGITS = 9
ASKED = b"endpoint-load-metrics-format"
TOLD = b"endpoint-load-metrics"


def replica_of(exchange: Exchange) -> int | None:
    """The replica that a request's header names; None where it has none.

    Raises:
        InvalidRequest: it is no number.
    """
    named = exchange.header(REPLICA)
    if named is None:
        return None
    if not (named.isascii() and named.isdecimal() and len(named) <= _MOST_DIGITS):
        text = f"X-data-parallel-rank must be the number of a replica, got {printable(named)}"
        raise InvalidRequest(text, param="X-data-parallel-rank")
    return int(named)


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
