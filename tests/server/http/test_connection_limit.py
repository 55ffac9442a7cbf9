"""A server with a connection limit closes the longest idle connection for a new one, and never one that is at work."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

App = Callable[[Any, Any, Any], Awaitable[None]]
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(app: App, most: int) -> AsyncIterator[tuple[HypercornServer, int]]:
    config = ServerConfig(port=0, disable_access_log=True, max_connections=most)
    listener, url = bind(config)
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group:
        group.start_soon(front.run)
        yield front, int(url.rpartition(":")[2])
        await front.stop(0.0)


@asynccontextmanager
async def connections(front: HypercornServer, port: int, count: int) -> AsyncIterator[list[SocketStream]]:
    """Idle connections, oldest first."""
    made: list[SocketStream] = []
    try:
        for number in range(count):
            made.append(await anyio.connect_tcp("127.0.0.1", port))
            await eventually(lambda number=number: len(front.connections) + front.connections.dropped == number + 1)
        yield made
    finally:
        for connection in made:
            await connection.aclose()


async def is_closed(connection: SocketStream) -> bool:
    """True if the server closes the connection; False if it answers a request on it."""
    with anyio.fail_after(10):
        try:
            await connection.send(REQUEST)
            return not await connection.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return True


async def test_a_new_connection_closes_the_longest_idle_one() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)

    async with served(app, 2) as (front, port), connections(front, port, 3) as made:
        assert front.connections.dropped == 1
        assert [await is_closed(connection) for connection in made] == [True, False, False]


async def test_a_connection_that_waits_for_its_answer_is_not_closed_for_a_new_one() -> None:
    begun, go_on = anyio.Event(), anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await go_on.wait()
        await answer(send)

    async with served(app, 1) as (front, port), connections(front, port, 1) as (working,):
        await working.send(REQUEST)
        await begun.wait()
        async with await anyio.connect_tcp("127.0.0.1", port) as late:
            assert await is_closed(late)
        go_on.set()
        with anyio.fail_after(10):
            assert (await working.receive()).startswith(b"HTTP/1.1 200")


async def test_a_connection_counts_as_idle_from_its_last_answer_on() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)

    async with served(app, 2) as (front, port), connections(front, port, 2) as (first, second):
        assert not await is_closed(first)
        async with await anyio.connect_tcp("127.0.0.1", port):
            await eventually(lambda: front.connections.dropped == 1)
            assert await is_closed(second)
            assert not await is_closed(first)
