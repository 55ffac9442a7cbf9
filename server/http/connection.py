"""One connection: hypercorn's, with our protocols in it, a deadline for heads, and an inbox that never holds it up."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup, _handle
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from troupellm.server.base.exchange import CHUNKS
from troupellm.server.http.http1 import AnsweredEarly, Http1
from troupellm.server.http.http2 import Http2

INBOX = 2
"""Of 64 KiB at most: chunks of a body that wait for the app; then the connection is not read."""

LINGER_SECONDS = 30.0
"""Seconds for the rest of a request that is answered; fewer where idle connections are kept for fewer."""


class Connection(TCPServer):  # type: ignore[misc]
    head_timeout: float | None = None
    """Seconds from the first byte of a request to the end of its head; None waits as long as keep-alive does."""

    h2c = False
    """HTTP/2 is taken without TLS too, from clients that know so."""

    on_idle: Callable[["Connection", bool], None] | None = None
    """Told when it begins to wait for requests, and when it ceases to."""

    _reads = True
    """Requests can still come."""

    async def run(self) -> None:
        try:
            addresses = self._addresses()  # here, for a group would wrap the error of a client that has left already
            async with _TaskGroup(self.loop, self) as group:
                self._task_group = group
                self.protocol = self._protocol(group, addresses)
                await self.protocol.initiate()
                await self.idle_task.restart(group, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()
        except OSError:
            pass  # the client has left
        finally:
            await self._close()

    def _addresses(self) -> tuple[Any, Any]:
        """The client's and the server's. Raises OSError: the client has left."""
        socket = self.writer.get_extra_info("socket")
        return (
            parse_socket_addr(socket.family, socket.getpeername()),
            parse_socket_addr(socket.family, socket.getsockname()),
        )

    def _protocol(self, group: TaskGroup, addresses: tuple[Any, Any]) -> "_Protocol":
        tls = self.writer.get_extra_info("ssl_object")
        arguments = (
            self.app,
            self.config,
            self.context,
            group,
            ConnectionState(self.state),
            tls is not None,
            *addresses,
            self.protocol_send,
        )
        return _Protocol(arguments, http2=tls is not None and tls.selected_alpn_protocol() == "h2", h2c=self.h2c)

    def takes_chunks(self, stream: object) -> bool:
        """Whether a chunk of an answer can be written at once; elsewhere its way may have to wait, or to do more."""
        protocol, transport = self.protocol.protocol, self.writer.transport
        if not isinstance(protocol, Http1) or not protocol.takes_chunks(stream) or self.send_lock.locked():
            return False
        return not (transport.get_write_buffer_size() or transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        self.writer.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            if not self._reads:
                return  # an answer that ends after its client has left: nothing is worth a keep-alive timeout any more
            if self.on_idle is not None:
                self.on_idle(self, event.idle)
        if isinstance(event, AnsweredEarly):
            await self._linger(last=event.last)
            return
        await super().protocol_send(event)

    async def _linger(self, *, last: bool) -> None:
        """The rest of a request is read for a while. A connection that lingers is closed for a new one, as if idle."""
        if last and self.writer.can_write_eof() and not self.writer.is_closing():
            self.writer.write_eof()
        if self.on_idle is not None:
            self.on_idle(self, True)
        await self.idle_task.restart(self._task_group, self._linger_timeout)

    async def _linger_timeout(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.context.terminated.wait(), min(LINGER_SECONDS, self.config.keep_alive_timeout))
        await asyncio.shield(self._initiate_server_close())

    async def _read_data(self) -> None:
        head_until: float | None = None
        while not self.reader.at_eof():
            if self.head_timeout is None or not self.protocol.inside_head:
                head_until = None
            elif head_until is None:
                head_until = self.loop.time() + self.head_timeout
            try:
                data = await self._read(head_until)
            except OSError as error:
                if isinstance(error, TimeoutError) and self.head_timeout is not None and head_until is not None:
                    await self.protocol.refuse_slow_head(self.head_timeout)
                break
            await self.protocol.handle(RawData(data))
            await asyncio.sleep(0)  # neither may have waited for anything: the others' turn, however much comes
        self._reads = False
        await self.protocol.handle(Closed())

    async def _read(self, until: float | None) -> bytes:
        if until is None:
            return bytes(await self.reader.read(MAX_RECV))
        return bytes(await asyncio.wait_for(self.reader.read(MAX_RECV), max(0.0, until - self.loop.time())))


class _Protocol:
    """HTTP/1.1, unless a client has agreed on HTTP/2 with TLS, or begins with it where it may."""

    def __init__(self, arguments: tuple[Any, ...], *, http2: bool, h2c: bool) -> None:
        self._arguments = arguments
        self.protocol = (Http2 if http2 else Http1)(*arguments)
        if isinstance(self.protocol, Http1):
            self.protocol.h2c = h2c

    @property
    def inside_head(self) -> bool:
        return isinstance(self.protocol, Http1) and self.protocol.inside_head

    async def refuse_slow_head(self, seconds: float) -> None:
        await self.protocol.refuse_slow_head(seconds)

    async def initiate(self) -> None:
        await self.protocol.initiate()

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            self.protocol = Http2(*self._arguments)
            await self.protocol.initiate()
            await self.protocol.handle(RawData(data=error.data))


class _Chunks:
    """Implements `server.exchange.Chunks` for one answer."""

    __slots__ = ("_connection", "_stream", "write")

    def __init__(self, connection: Connection, stream: object) -> None:
        self._connection = connection
        self._stream = stream
        self.write = connection.write_chunk

    def ready(self) -> bool:
        return self._connection.takes_chunks(self._stream)


class _TaskGroup(TaskGroup):  # type: ignore[misc]
    """Runs the app for the requests of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        super().__init__(loop)
        self._connection = connection

    async def spawn_app(
        self, app: Any, config: Any, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        inbox, connection, stream = _Inbox(), self._connection, getattr(send, "__self__", None)

        async def swift_send(message: Any) -> None:
            """hypercorn's takes 4 µs to find out that a chunk of a stream is to be written."""
            if message is None:
                inbox.close()
                scope["extensions"].pop(CHUNKS, None)  # else an answer would be held until garbage is collected
            elif message.get("more_body") and (data := message.get("body")) and connection.takes_chunks(stream):
                connection.write_chunk(data)
                return
            await send(message)

        if scope["type"] == "http":
            scope["extensions"][CHUNKS] = _Chunks(connection, stream)

        self.spawn(_handle, app, config, scope, inbox.get, swift_send, partial(self._loop.run_in_executor, None), None)
        return inbox.put


class _Inbox:
    """The received events of one request. hypercorn's queue, if full, holds up the end of a request answered early."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """The app has ended: a sender of more need not wait."""
        self._closed = True
        self._changed.set()

    async def put(self, message: Any) -> None:
        if message["type"] == "http.disconnect":
            self._closed = True
        while len(self._messages) >= INBOX and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._closed or message["type"] != "http.request":
            self._messages.append(message)
        self._changed.set()

    async def get(self) -> Any:
        while not self._messages:
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._changed.set()
        return message
