"""/v1/batches."""

import secrets

import msgspec

from troupellm.protocol.api.batches import Batch, BatchesQuery, BatchRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.storage.batches import new_batch, no_such

LONGEST_SECONDS = 7 * 24 * 3600
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


async def create(host: ServerState, exchange: Exchange, request: BatchRequest) -> None:
    """POST /v1/batches."""
    host.batches.require_runner()
    if request.endpoint not in host.batches.endpoints:
        known = ", ".join(sorted(host.batches.endpoints))
        raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
    window = request.completion_window
    seconds = int(window[:-1]) * _UNITS[window[-1]]
    if seconds > LONGEST_SECONDS:
        raise InvalidRequest("completion_window may be 7d at most", param="completion_window")
    name = f"batch_{secrets.token_hex(12)}"
    batch = new_batch(name, request.endpoint, request.input_file_id, (window, seconds), request.metadata)
    life = None if request.output_expires_after is None else request.output_expires_after.seconds
    await host.batches.store.add_batch(exchange.owner, batch, life)
    await exchange.respond(200, msgspec.json.encode(batch))


async def listing(host: ServerState, exchange: Exchange, _: None) -> None:
    """GET /v1/batches."""
    query: BatchesQuery = exchange.query
    page = await host.batches.store.batches(exchange.owner, after=query.after, limit=query.limit)
    await exchange.respond(200, msgspec.json.encode(page))


async def retrieve(host: ServerState, exchange: Exchange, _: None) -> None:
    """GET /v1/batches/{batch_id}."""
    await _answer(exchange, await host.batches.store.batch(exchange.owner, exchange.path_values["batch_id"]))


async def cancel(host: ServerState, exchange: Exchange, _: None) -> None:
    """POST /v1/batches/{batch_id}/cancel."""
    batch = await host.batches.store.cancel_batch(exchange.owner, exchange.path_values["batch_id"])
    await _answer(exchange, batch)


async def _answer(exchange: Exchange, batch: Batch | None) -> None:
    if batch is None:
        raise no_such("batch")
    await exchange.respond(200, msgspec.json.encode(batch))
