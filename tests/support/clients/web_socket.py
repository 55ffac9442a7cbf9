"""A WebSocket client over a raw connection: the handshake, and text frames in JSON."""

import json
from collections import deque
from contextlib import asynccontextmanager
from typing import Any

import anyio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)


class Socket:
    def __init__(self, connection: Any, path: str, headers: dict[str, str]) -> None:
        self._connection = connection
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: deque[Any] = deque()
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._first = self._protocol.send(Request(host="localhost", target=path, extra_headers=fields))
        self.status = 101
        self.refusal = b""

    async def open(self) -> None:
        await self._connection.stream.send(self._first)
        event = await self._next()
        if isinstance(event, RejectConnection):
            self.status = event.status_code
            while isinstance(event := await self._next(), RejectData) and not event.body_finished:
                self.refusal += event.data
            self.refusal += getattr(event, "data", b"")
            return
        assert isinstance(event, AcceptConnection)
        assert not event.extensions

    async def send(self, body: dict[str, Any] | str | bytes) -> None:
        if isinstance(body, bytes):
            data = self._protocol.send(BytesMessage(data=body))
        else:
            data = self._protocol.send(TextMessage(data=body if isinstance(body, str) else json.dumps(body)))
        await self._connection.stream.send(data)

    async def receive(self) -> dict[str, Any]:
        """The next frame; the code of a closing as `{"closed": code}`."""
        text = ""
        while True:
            event = await self._next()
            if isinstance(event, CloseConnection):
                return {"closed": event.code}
            assert isinstance(event, TextMessage)
            text += event.data
            if event.message_finished:
                found: dict[str, Any] = json.loads(text)
                return found

    async def until_end(self) -> list[dict[str, Any]]:
        """The frames of one response, or an error."""
        frames = [await self.receive()]
        while frames[-1].get("type") not in (
            "response.completed",
            "response.incomplete",
            "response.failed",
            "error",
        ):
            assert "closed" not in frames[-1]
            frames.append(await self.receive())
        return frames

    async def ask(self, **fields: Any) -> list[dict[str, Any]]:
        await self.send({"type": "response.create", **fields})
        return await self.until_end()

    async def _next(self) -> Any:
        with anyio.fail_after(30):
            while True:
                if self._events:
                    event = self._events.popleft()
                    if not isinstance(event, Ping):
                        return event
                    continue
                try:
                    self._protocol.receive_data(await self._connection.stream.receive())
                except anyio.EndOfStream:
                    self._protocol.receive_data(None)
                self._events.extend(self._protocol.events())


@asynccontextmanager
async def open_socket(served: Any, path: str = "/v1/responses", **headers: str):
    connection = await served.raw(b"")
    socket = Socket(connection, path, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        await socket.open()
        yield socket
    finally:
        await connection.close()
