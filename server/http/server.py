"""hypercorn's connections behind a listener of our own, so that they end when we say.

hypercorn's own `serve` keeps the descriptor of a connection that its client closed until the keep-alive timeout, does
not survive cancellation, and on Python 3.12.1 and later waits for stalled clients without a bound.
"""

import asyncio
import logging
import socket
import ssl

import anyio
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.utils import wrap_app

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.base.exchange import MAX_HEADER_BYTES, Asgi
from troupellm.server.http.connection import Connection
from troupellm.server.http.connection_limit import ConnectionLimit, connection_limit

CLOSE_SECONDS = 0.3
"""Seconds that connections have to close by themselves; then they are cut."""
_CUT_SECONDS = 0.2
"""Seconds that cut connections have to end."""
HANDSHAKE_SECONDS = 10.0
"""Seconds that a client has for the TLS handshake."""
NEVER = 10.0**9
MAX_STREAMS = 100
"""Of one HTTP/2 connection."""


class HypercornServer:
    """Serves an app on a listening socket, which it takes over, until `stop` or cancellation."""

    def __init__(self, app: Asgi, config: ServerConfig, listener: socket.socket) -> None:
        self._app = wrap_app(app, 0, "asgi")
        self._config = _hypercorn_config(config)
        self._tls = tls_context(config)
        self._head_timeout = config.header_timeout or None
        self._h2c = config.h2c
        self._listener = listener
        self._context = WorkerContext(None)
        self.connections = ConnectionLimit(connection_limit(config))
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._stop = anyio.Event()
        self._close_seconds = CLOSE_SECONDS
        self._stopped = anyio.Event()

    async def run(self) -> None:
        server = await asyncio.start_server(
            self._connected,
            sock=self._listener,
            backlog=self._config.backlog,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_SECONDS,
        )
        try:
            await self._stop.wait()
        finally:
            server.close()
            with anyio.CancelScope(shield=True):
                await self._close_connections()
            self._stopped.set()

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop accepting and close the connections; connections that are open after `seconds` are cut."""
        self._close_seconds = min(seconds, self._close_seconds) if self._stop.is_set() else seconds
        self._stop.set()
        await self._stopped.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        connection = Connection(self._app, loop, self._config, self._context, {}, reader, writer)
        connection.head_timeout, connection.h2c = self._head_timeout, self._h2c
        if not self.connections.enter(connection):
            writer.transport.abort()
            return
        self._connections[task] = writer
        try:
            await connection
        except OSError:
            pass  # a connection that ended while it was being closed
        finally:
            del self._connections[task]
            self.connections.leave(connection)

    async def _close_connections(self) -> None:
        await self._context.terminated.set()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=self._close_seconds)
        for writer in list(self._connections.values()):
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=_CUT_SECONDS)


def _hypercorn_config(config: ServerConfig) -> Config:
    settings = Config()
    settings.root_path = config.root_path
    settings.backlog = config.backlog
    settings.keep_alive_timeout = config.keep_alive_timeout or NEVER
    settings.keep_alive_max_requests = 2**31
    settings.h2_max_concurrent_streams = MAX_STREAMS
    settings.h2_max_header_list_size = 2 * MAX_HEADER_BYTES
    settings.websocket_max_message_size = config.max_body_bytes
    settings.include_server_header = False
    settings.accesslog = None
    settings.errorlog = logging.getLogger("troupellm.server.http")
    settings.errorlog.setLevel(logging.WARNING)
    return settings


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of `ssl_keyfile`, `ssl_certfile` and `ssl_ca_certs`; None without them.

    Raises:
        ConfigError: one is missing, cannot be read, or is no such file.
    """
    files = {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    if not any(files.values()):
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    if config.ssl_certfile is None:
        raise ConfigError("ssl_certfile is missing: a certificate is needed for TLS", param="ssl_certfile")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"ssl_certfile and ssl_keyfile: {reason or error}", param="ssl_certfile") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"ssl_ca_certs: {reason or error}", param="ssl_ca_certs") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
