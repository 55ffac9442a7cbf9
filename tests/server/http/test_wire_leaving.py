"""Connections whose client has left end with their app in every case: they wait for no timeout and for no client."""

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import h2.config
import h2.connection
import pytest
from anyio.lowlevel import checkpoint
from serving import eventually

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer

pytestmark = pytest.mark.anyio

App = Callable[[Any, Any, Any], Awaitable[None]]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
MORE_THAN_SOCKETS_TAKE = b"x" * (16 << 20)


def http2_request() -> bytes:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    fields = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "localhost")]
    client.send_headers(1, fields, end_stream=True)
    return client.data_to_send()


@asynccontextmanager
async def served(app: App) -> AsyncIterator[tuple[HypercornServer, int]]:
    """Idle connections are kept for ever."""
    config = ServerConfig(port=0, disable_access_log=True, keep_alive_timeout=0, write_timeout=0, h2c=True)
    listener, url = bind(config)
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group:
        group.start_soon(front.run)
        yield front, int(url.rpartition(":")[2])
        await front.stop(0.0)


async def leave(front: HypercornServer, port: int, request: bytes, begun: anyio.Event) -> None:
    """Send a request, reset the connection once the app has `begun`, and see the server forget it."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        with anyio.fail_after(10):
            await begun.wait()
        assert len(front.connections) == 1
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await eventually(lambda: len(front.connections) == 0)


async def left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("request_bytes", [REQUEST, http2_request()], ids=["http1", "http2"])
async def test_an_answer_that_ends_after_its_client_has_left_waits_for_no_further_request(request_bytes: bytes) -> None:
    begun = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.set()
        await left(receive)
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    async with served(app) as (front, port):
        await leave(front, port, request_bytes, begun)


async def test_a_last_piece_that_its_client_did_not_take_waits_for_no_further_request() -> None:
    begun = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        begun.set()
        await send({"type": "http.response.body", "body": MORE_THAN_SOCKETS_TAKE, "more_body": False})

    async with served(app) as (front, port):
        await leave(front, port, REQUEST, begun)


async def test_a_request_behind_one_that_was_left_is_waited_for_by_nobody() -> None:
    begun = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def pour() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"piece", "more_body": True})
                await checkpoint()

        await send(START)
        begun.set()
        async with anyio.create_task_group() as group:
            group.start_soon(pour)
            await left(receive)
            group.cancel_scope.cancel()

    async with served(app) as (front, port):
        await leave(front, port, 2 * REQUEST, begun)
