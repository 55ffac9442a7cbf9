"""hypercorn's connections behind a listener of our own, so that they end when we say.

hypercorn's own `serve` keeps the descriptor of a connection that its client closed until the keep-alive timeout, does
not survive cancellation, and on Python 3.12.1 and later waits for stalled clients without a bound.
"""

import asyncio
import logging
import secrets
import socket

import anyio
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.utils import wrap_app

from troupellm.protocol.config import ServerConfig
from troupellm.server.errors import answer, bad_request_head
from troupellm.server.exchange import JSON, Asgi

CLOSE_SECONDS = 0.3
"""What connections get to close by themselves; then they are cut."""
_CUT_SECONDS = 0.2
"""What connections that were cut get to notice it."""
_KEEP_ALIVE_SECONDS = 75.0


class HttpFront:
    """Serves an app on a listening socket, which it takes over, until `stop` or cancellation."""

    def __init__(self, app: Asgi, config: ServerConfig, listener: socket.socket) -> None:
        self._app = wrap_app(app, 0, "asgi")
        self._config = _hypercorn_config(config)
        self._listener = listener
        self._context = WorkerContext(None)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._stop = anyio.Event()
        self._close_seconds = CLOSE_SECONDS
        self._stopped = anyio.Event()

    async def run(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, backlog=self._config.backlog)
        try:
            await self._stop.wait()
        finally:
            server.close()
            with anyio.CancelScope(shield=True):
                await self._close_connections()
            self._stopped.set()

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop accepting and close the connections; what is open after `seconds` is cut, whatever its client does."""
        self._close_seconds = min(seconds, self._close_seconds) if self._stop.is_set() else seconds
        self._stop.set()
        await self._stopped.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            loop = asyncio.get_running_loop()
            await _Connection(self._app, loop, self._config, self._context, {}, reader, writer)
        except OSError:
            pass  # a connection that ended while it was being closed
        finally:
            del self._connections[task]

    async def _close_connections(self) -> None:
        await self._context.terminated.set()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=self._close_seconds)
        for writer in list(self._connections.values()):
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=_CUT_SECONDS)


class _Connection(TCPServer):  # type: ignore[misc]
    async def _read_data(self) -> None:
        whole = self.protocol
        whole.protocol = _Http1(
            whole.app, whole.config, whole.context, whole.task_group, whole.state, whole.ssl, whole.client,
            whole.server, whole.send,
        )  # fmt: skip
        await super()._read_data()
        await self.idle_task.stop()


class _Http1(H11Protocol):  # type: ignore[misc]
    """Answers what is not HTTP in the shape of every other error; hypercorn's own answer has no body."""

    async def _send_error_response(self, status_code: int) -> None:
        error = answer(bad_request_head(status_code))
        headers = [
            (b"content-type", JSON),
            (b"content-length", str(len(error.body)).encode()),
            (b"x-request-id", secrets.token_hex(16).encode()),
            *error.headers,
        ]
        await self.stream_send(Response(stream_id=STREAM_ID, headers=headers, status_code=error.status))
        await self.stream_send(Body(stream_id=STREAM_ID, data=error.body))
        await self.stream_send(EndBody(stream_id=STREAM_ID))


def _hypercorn_config(config: ServerConfig) -> Config:
    settings = Config()
    settings.root_path = config.root_path
    settings.backlog = config.backlog
    settings.keep_alive_timeout = _KEEP_ALIVE_SECONDS
    settings.keep_alive_max_requests = 2**31
    settings.h2_max_concurrent_streams = 1024
    settings.include_server_header = False
    settings.accesslog = None
    settings.errorlog = logging.getLogger("troupellm.server.http")
    settings.errorlog.setLevel(logging.WARNING)
    return settings
