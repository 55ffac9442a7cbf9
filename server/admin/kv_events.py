"""`GET /kv_events`: the engine's KV events as a stream, in any of the server's processes."""

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from troupellm.protocol.api import admin
from troupellm.protocol.messages.kv_events import EventsLost, KVEventsRead
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import open_events
from troupellm.server.host.server_state import ServerState

WAIT_SECONDS = 2.0
"""How long the engine is asked to wait for one event before it is asked again."""


async def send_kv_events(host: ServerState, exchange: Exchange, body: msgspec.Struct | None) -> None:
    """One answer, or server-sent events until the engine ends or the client leaves; one that reads slowly misses some,
    and is told how many."""
    host.require()
    query: admin.KVEventsQuery = exchange.query
    first = await _read(host, query)
    if not query.stream:
        await exchange.respond(200, msgspec.json.encode(first))
        return
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.watch, group.cancel_scope)
        try:
            await _send(host, exchange, first, query)
        except Exception as error:  # raised below, where it stands alone
            errors.append(error)
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]


async def _send(host: ServerState, exchange: Exchange, read: KVEventsRead, asked: admin.KVEventsQuery) -> None:
    """A snapshot follows where events were missed, if one was asked for."""
    replica = asked.replica
    async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
        await events.send(_framed(read.events) or b": kv events\n\n")  # the client hears that it is let in
        while not read.ended and not host.draining:
            if asked.snapshot and read.events and isinstance(read.events[0], EventsLost):
                query = admin.KVEventsQuery(snapshot=True, replica=replica)
            elif read.snapshot is not None:
                query = admin.KVEventsQuery(after=read.last, snapshot_begun=read.snapshot, replica=replica)
            else:
                query = admin.KVEventsQuery(after=read.last, seconds=WAIT_SECONDS, replica=replica)
            read = await _read(host, query)
            if read.events:
                await events.send(_framed(read.events))
        await events.finish(b"", b"")


async def _read(host: ServerState, query: admin.KVEventsQuery) -> KVEventsRead:
    answer = await host.administer("kv_events", msgspec.json.encode(query))
    return msgspec.json.decode(answer, type=KVEventsRead)


def _framed(events: Sequence[Any]) -> bytes:
    return b"".join(b"id: %d\ndata: %s\n\n" % (event.seq, msgspec.json.encode(event)) for event in events)
