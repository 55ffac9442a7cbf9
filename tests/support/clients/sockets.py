"""Clients down to the socket: with small buffers, that read slowly or never, that close one half."""

import socket
from contextlib import suppress
from typing import Self

import anyio


class RawSocket:
    def __init__(self, plain: socket.socket) -> None:
        self.plain = plain
        self.seen = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            await anyio.wait_writable(self.plain)
            rest = rest[self.plain.send(rest) :]

    async def read(self, most: int = 65_536) -> bytes:
        """The bytes that have arrived; empty at the end of the connection."""
        await anyio.wait_readable(self.plain)
        try:
            data = self.plain.recv(most)
        except ConnectionError:
            return b""
        self.seen += data
        return data

    async def read_until(self, mark: bytes, timeout: float = 20.0) -> bytes:
        with anyio.fail_after(timeout):
            while mark not in self.seen:
                assert await self.read(), f"the connection ended before {mark!r}: {self.seen!r}"
        return self.seen

    async def read_all(self, timeout: float = 20.0) -> bytes:
        """Until the server closes."""
        with anyio.fail_after(timeout):
            while await self.read():
                pass
        return self.seen

    def shut_down_sending(self) -> None:
        self.plain.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.plain.close()


async def raw_socket(port: int, request: bytes = b"", *, receive_buffer: int | None = None) -> RawSocket:
    """A connection that has sent `request`."""
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.setblocking(False)
    with suppress(BlockingIOError):
        plain.connect(("127.0.0.1", port))
    connection = RawSocket(plain)
    await anyio.wait_writable(plain)
    await connection.send(request)
    return connection
