"""Pieces of a streamed answer: written at once where nothing is in the way, and in the usual way where something is."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypercorn.protocol.http_stream import HTTPStream

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.base.exchange import CHUNKS
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer

pytestmark = pytest.mark.anyio

App = Callable[[Any, Any, Any], Awaitable[None]]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@asynccontextmanager
async def served(app: App) -> AsyncIterator[int]:
    config = ServerConfig(port=0, disable_access_log=True)
    listener, url = bind(config)
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group:
        group.start_soon(front.run)
        yield int(url.rpartition(":")[2])
        await front.stop(0.0)


async def answer(port: int, method: str = "GET") -> bytes:
    """Everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return data


def body_of(data: bytes) -> bytes:
    body, position = b"", data.index(b"\r\n\r\n") + 4
    while position < len(data):
        start = data.index(b"\r\n", position) + 2
        end = start + int(data[position : start - 2], 16)
        body += data[start:end]
        assert data[end : end + 2] == b"\r\n"
        position = end + 2
    return body


def streaming(pieces: list[bytes]) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    return app


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Pieces that went the usual way."""
    seen: list[bytes] = []
    app_send = HTTPStream.app_send

    async def watched(self: HTTPStream, message: Any) -> None:
        if message is not None and message.get("more_body"):
            seen.append(message["body"])
        await app_send(self, message)

    monkeypatch.setattr(HTTPStream, "app_send", watched)
    return seen


async def test_pieces_to_a_client_that_reads_are_written_at_once(usual: list[bytes]) -> None:
    pieces = [b"data: %d\n\n" % number for number in range(50)]
    async with served(streaming(pieces)) as port:
        for _ in range(2):
            assert body_of(await answer(port)) == b"".join(pieces) + b"end"
    assert usual == []


async def test_pieces_that_the_socket_does_not_take_go_the_usual_way_and_in_order(usual: list[bytes]) -> None:
    pieces = [bytes([number]) * (1 << 18) for number in range(6)]
    async with served(streaming(pieces)) as port:
        assert body_of(await answer(port)) == b"".join(pieces) + b"end"
    assert usual


async def test_the_answer_to_head_has_no_pieces(usual: list[bytes]) -> None:
    async with served(streaming([b"a", b"b"])) as port:
        assert (await answer(port, "HEAD")).endswith(b"\r\n\r\n")
    assert usual == [b"a", b"b"]


async def test_a_client_that_leaves_between_pieces_is_told_of_and_written_to_no_more() -> None:
    over, begun = anyio.Event(), anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body", "body": b"late", "more_body": True})
        over.set()

    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with anyio.fail_after(10):
            await begun.wait()
            writer.transport.abort()
            await over.wait()


async def test_an_app_may_write_pieces_itself_while_its_client_takes_them(usual: list[bytes]) -> None:
    seen: dict[str, bool] = {}
    many = b"x" * (1 << 22)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pieces = scope["extensions"][CHUNKS]
        seen["before"] = pieces.ready()
        await send(START)
        seen["begun"] = pieces.ready()
        pieces.write(b"one")
        pieces.write(b"two")
        seen["after"] = pieces.ready()
        pieces.write(many)
        seen["full"] = pieces.ready()
        await send({"type": "http.response.body", "body": b"three", "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})
        seen["over"] = pieces.ready()

    async with served(app) as port:
        assert body_of(await answer(port)) == b"onetwo" + many + b"threeend"
    assert seen == {"before": False, "begun": True, "after": True, "full": False, "over": False}
    assert usual == [b"three"]
