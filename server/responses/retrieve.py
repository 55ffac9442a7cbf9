"""Responses that were kept: GET, DELETE, cancel, and the input that they were made from."""

from functools import partial
from typing import Annotated

import anyio
import msgspec
from msgspec import Meta

from troupellm.protocol.api.response_objects import DeletedResponse, InputItemList
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import INLINE_BYTES
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.responses.follow import follow, not_found
from troupellm.server.responses.jobs import Jobs
from troupellm.server.responses.listing import ItemsQuery, page_of, shown
from troupellm.server.responses.prepare import no_store
from troupellm.server.storage.responses_rows import Items, StoredResponse

CANCEL_SECONDS = 5.0
"""Seconds that a job of this process has to leave the engine before its cancellation is answered."""


class RetrieveQuery(msgspec.Struct, kw_only=True):
    stream: bool | None = None
    starting_after: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Number of an event; those behind it are sent."""
    include: list[str] | None = None
    """Accepted without effect: all stored fields are returned."""
    include_obfuscation: bool | None = None


async def retrieve(host: ServerState, jobs: Jobs, exchange: Exchange, _: None) -> None:
    query: RetrieveQuery = exchange.query
    stored = await _find(host, exchange)
    if not query.stream:
        if query.starting_after is not None:
            raise InvalidRequest("starting_after needs stream: true", param="starting_after")
        await exchange.respond(200, stored.body)
        return
    if not stored.logged:
        message = "stream: only responses that were created with background and stream can be streamed again"
        raise InvalidRequest(message, param="stream")
    host.enter(exchange)
    after = -1 if query.starting_after is None else query.starting_after
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.watch, group.cancel_scope)
        await follow(host, jobs, exchange, exchange.owner, stored.id, after)
        group.cancel_scope.cancel()


async def delete(host: ServerState, jobs: Jobs, exchange: Exchange, _: None) -> None:
    name = (await _find(host, exchange)).id
    if not await host.responses.delete(exchange.owner, name):
        raise not_found()
    await _end(jobs, name)
    await exchange.respond(200, msgspec.json.encode(DeletedResponse(id=name)))


async def cancel(host: ServerState, jobs: Jobs, exchange: Exchange, _: None) -> None:
    """Idempotent: a response that has ended stays as it is."""
    stored = await _find(host, exchange)
    if not stored.background:
        raise InvalidRequest("only responses that were created with background can be cancelled", param="response_id")
    if stored.running:
        response = msgspec.json.decode(stored.body) | {"status": "cancelled"}
        await host.responses.update(exchange.owner, stored.id, "cancelled", msgspec.json.encode(response))
        await _end(jobs, stored.id)
        stored = await _find(host, exchange)
    await exchange.respond(200, stored.body)


async def input_items(host: ServerState, jobs: Jobs, exchange: Exchange, _: None) -> None:
    query: ItemsQuery = exchange.query
    stored = await _find(host, exchange)
    read = partial(msgspec.json.decode, stored.items, type=Items)
    given = read() if len(stored.items) <= INLINE_BYTES else await offload(read)
    page, has_more = page_of([shown(item) for item in given], query, "response")
    listing = InputItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=has_more,
    )
    await exchange.respond(200, msgspec.json.encode(listing))


async def _find(host: ServerState, exchange: Exchange) -> StoredResponse:
    """
    Raises:
        HttpError: 404, it is not there, or another key's.
    """
    if not host.responses.enabled:
        raise no_store("response_id")
    stored = await host.responses.get(exchange.owner, exchange.path_values["response_id"])
    if stored is None:
        raise not_found()
    return stored


async def _end(jobs: Jobs, name: str) -> None:
    job = jobs.find(name)
    if job is not None:
        job.cancel()
        with anyio.move_on_after(CANCEL_SECONDS):
            await job.ended.wait()
