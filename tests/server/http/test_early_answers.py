"""A client that sends its whole body before it reads gets an answer that was made before the body had arrived."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.http.http1 import MOST_DROPPED
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer
from troupellm.tests.support.servers.serving import RawConnection, eventually

pytestmark = pytest.mark.anyio

BODY = b"x" * (8 << 20)
"""More than the buffers of both sockets take."""
CLOSE = [(b"connection", b"close")]


@asynccontextmanager
async def refusing(headers: list[tuple[bytes, bytes]], **settings: Any) -> AsyncIterator[tuple[HypercornServer, int]]:
    """A server whose app answers 503 at once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"4"), *headers]}
        await send(start)
        await send({"type": "http.response.body", "body": b"full"})

    config = ServerConfig(port=0, disable_access_log=True, **settings)
    listener, url = bind(config)
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group:
        group.start_soon(front.run)
        yield front, int(url.rpartition(":")[2])
        await front.stop(0.0)


async def connect(port: int, sent: bytes = b"") -> RawConnection:
    connection = RawConnection(await anyio.connect_tcp("127.0.0.1", port))
    await connection.stream.send(sent)
    return connection


def head(length: int = len(BODY)) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"


@pytest.mark.parametrize("headers", [[], CLOSE], ids=["kept", "closed"])
@pytest.mark.parametrize(
    "request_bytes", [head() + BODY, CHUNKED + CHUNK * 128 + b"0\r\n\r\n"], ids=["length", "chunks"]
)
async def test_an_early_answer_reaches_a_client_that_sends_all_before_it_reads(
    headers: list[tuple[bytes, bytes]], request_bytes: bytes
) -> None:
    async with refusing(headers) as (front, port):
        client = await connect(port, request_bytes)
        assert (await client.read_until(b"full")).startswith(b"HTTP/1.1 503 ")
        await client.close()
        await eventually(lambda: len(front.connections) == 0)


REFUSED = {
    "a header that is too large": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + BODY + b"\r\n\r\n", b"HTTP/1.1 431 "),
    "no HTTP": (b"nonsense\r\n\r\n" + BODY, b"HTTP/1.1 400 "),
    "a bad chunk behind an early answer": (CHUNKED + CHUNK + b"zz\r\n" + BODY, b"HTTP/1.1 503 "),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_head_is_answered_though_its_client_sends_all_before_it_reads(name: str) -> None:
    request, status = REFUSED[name]
    async with refusing([]) as (front, port):
        client = await connect(port, request)
        assert (await client.read_all()).startswith(status), "the end follows the answer, and not a reset"
        assert client.seen.endswith((b"}", b"full"))
        await client.close()
        await eventually(lambda: len(front.connections) == 0)


async def test_a_head_without_an_end_is_not_read_for_ever() -> None:
    async with refusing([]) as (front, port):
        client = await connect(port, b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        with anyio.fail_after(60), pytest.raises(anyio.BrokenResourceError):
            await client.stream.send(b"y" * (4 * MOST_DROPPED))
        await client.close()
        await eventually(lambda: len(front.connections) == 0)


async def test_the_rest_of_a_refused_head_is_awaited_no_longer_than_a_request_is() -> None:
    async with refusing([], keep_alive_timeout=0.1) as (front, port):
        client = await connect(port, b"nonsense\r\n\r\n")
        await client.read_until(b"invalid_http")
        await eventually(lambda: len(front.connections) == 0)
        await client.close()


async def test_a_connection_is_used_again_once_the_rest_of_a_body_has_come() -> None:
    async with refusing([]) as (_, port):
        client = await connect(port, head() + BODY + head(0))
        await client.read_until(b"full")
        client.seen = client.seen.partition(b"full")[2]
        assert (await client.read_until(b"full")).startswith(b"HTTP/1.1 503 ")
        await client.close()


async def test_an_answer_that_closes_ends_before_the_body_does() -> None:
    async with refusing(CLOSE) as (front, port):
        client = await connect(port, head())
        assert (await client.read_all()).endswith(b"full")
        assert len(front.connections) == 1, "the rest of the body may still come"
        await client.close()
        await eventually(lambda: len(front.connections) == 0)


async def test_a_body_without_an_end_is_not_read_for_ever() -> None:
    async with refusing([]) as (front, port):
        client = await connect(port, CHUNKED)
        with anyio.fail_after(60), pytest.raises(anyio.BrokenResourceError):
            await client.stream.send(CHUNK * (4 * MOST_DROPPED // len(CHUNK)))
        await client.close()
        await eventually(lambda: len(front.connections) == 0)


@pytest.mark.parametrize("headers", [[], CLOSE], ids=["kept", "closed"])
async def test_the_rest_of_a_body_is_awaited_no_longer_than_a_request_is(headers: list[tuple[bytes, bytes]]) -> None:
    async with refusing(headers, keep_alive_timeout=0.1) as (front, port):
        client = await connect(port, head())
        await client.read_until(b"full")
        await eventually(lambda: len(front.connections) == 0)
        await client.close()


@pytest.mark.parametrize("headers", [[], CLOSE], ids=["kept", "closed"])
async def test_a_connection_whose_body_still_comes_gives_way_to_a_new_one(headers: list[tuple[bytes, bytes]]) -> None:
    async with refusing(headers, max_connections=1) as (front, port):
        first = await connect(port, head())
        await first.read_until(b"full")
        second = await connect(port, head(0))
        assert (await second.read_until(b"full")).startswith(b"HTTP/1.1 503 ")
        assert front.connections.dropped == 1
        for client in (first, second):
            await client.close()
