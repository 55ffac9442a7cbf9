"""The real app on hypercorn and a loopback socket, in the test's own process; clients for it, down to raw bytes."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import httpx

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.access.host_and_origin import guard_of
from troupellm.server.access.keys import read_keys
from troupellm.server.app.app import App, admin_access, asgi
from troupellm.server.base.exchange import Asgi
from troupellm.server.host.server_state import ServerState
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer
from troupellm.tests.support.clients.plain_http import NO_TLS

SPARE_SECONDS = 60.0
"""Another interpreter that imports torch, on a busy machine."""


class Served:
    """A running server."""

    def __init__(self, app: App, url: str, front: HypercornServer) -> None:
        self.app = app
        self.host = app.host
        self.url = url
        self.connections = front.connections
        self.port = int(url.rpartition(":")[2])

    def client(self, *, key: str | None = None, timeout: float = 60.0) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        options = {"base_url": self.url, "headers": headers, "timeout": timeout}
        return httpx.AsyncClient(**options, trust_env=False, verify=NO_TLS)

    async def raw(self, request: bytes) -> "RawConnection":
        """A connection that has sent `request`."""
        connection = RawConnection(await anyio.connect_tcp("127.0.0.1", self.port))
        await connection.stream.send(request)
        return connection


class RawConnection:
    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self.seen = b""

    async def read_until(self, mark: bytes, timeout: float = 20.0) -> bytes:
        with anyio.fail_after(timeout):
            while mark not in self.seen:
                self.seen += await self.stream.receive()
        return self.seen

    async def read_all(self, timeout: float = 20.0) -> bytes:
        """Until the server closes."""
        with anyio.fail_after(timeout):
            try:
                while True:
                    self.seen += await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return self.seen

    async def close(self) -> None:
        await self.stream.aclose()


def server_config(**settings: Any) -> ServerConfig:
    return ServerConfig(port=0, **settings)


def guarded_app(engine: Any, config: ServerConfig) -> App:
    """The app as `troupellm serve` makes it: it knows which address it listens on, and looks at Host and Origin."""
    host = ServerState(config, engine)
    return App(host, keys=read_keys(config).callers, guard=guard_of(config), **admin_access(config))


@asynccontextmanager
async def running_server(
    engine: Any, config: ServerConfig | None = None, *, app: App | None = None
) -> AsyncIterator[Served]:
    """Serve an open engine until the block ends."""
    config = config or server_config()
    app = app or asgi(engine, config=config)
    async with _front_of(app, app.host, config) as (front, url):
        yield Served(app, url, front)


@asynccontextmanager
async def served_by(app: Asgi, host: ServerState, config: ServerConfig) -> AsyncIterator[str]:
    """Serve what stands before an app until the block ends; gives the URL."""
    async with _front_of(app, host, config) as (_, url):
        yield url


@asynccontextmanager
async def _front_of(app: Asgi, host: ServerState, config: ServerConfig) -> AsyncIterator[tuple[HypercornServer, str]]:
    listener, url = bind(config)
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group, host.running():
        group.start_soon(front.run)
        try:
            yield front, url
        finally:
            with anyio.CancelScope(shield=True):
                await front.stop()


def http_request(path: str, body: bytes | Mapping[str, Any], **headers: str) -> bytes:
    """A POST as raw bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, whose framing is checked on the way."""
    blocks = [block for block in body.replace(": keep-alive\n", "").split("\n\n") if block]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), body
    assert blocks[-1] == "data: [DONE]", body
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


async def eventually(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Until a server's published state is as wanted; fails with TimeoutError."""
    with anyio.fail_after(timeout):
        while not condition():  # noqa: ASYNC110 - plain numbers without change events
            await anyio.sleep(0.005)


async def with_spare(engine: Engine) -> int:
    """Until a spare process stands beside an engine's worker; its id."""
    with anyio.fail_after(SPARE_SECONDS):
        while (pid := engine.snapshot().spare_worker_pid) is None:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)
    return pid


@asynccontextmanager
async def lifespan_of(app: App) -> AsyncIterator[list[str]]:
    """Play the server's part of lifespan; gives the types of the app's messages."""
    to_app, receive = anyio.create_memory_object_stream[dict[str, str]](1)
    answers: list[str] = []
    answered = anyio.Event()

    async def send(message: Mapping[str, Any]) -> None:
        answers.append(message["type"])
        answered.set()

    async with anyio.create_task_group() as group, to_app, receive:
        group.start_soon(app, {"type": "lifespan"}, receive.receive, send)
        await to_app.send({"type": "lifespan.startup"})
        await answered.wait()
        yield answers
        if answers[-1].endswith("complete"):
            await to_app.send({"type": "lifespan.shutdown"})
            await eventually(lambda: len(answers) == 2)
