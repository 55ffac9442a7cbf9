"""Frames between an API process and its parent; a sender never waits.

`post` queues in the transport; how much may wait there is bounded: a sender of much asks `drained` first, and a peer
that takes nothing at all is dropped.
"""

import asyncio  # noqa: TID251 - this is the port to its streams
import contextlib
import socket
from collections import deque
from typing import Any, Generic

import anyio

from troupellm.protocol.wire.frames import (
    MAX_FRAME_BYTES,
    READ_BYTES,
    Assembler,
    Codec,
    FrameError,
    Hello,
    PeerGone,
    ReceivedT,
    SentT,
)

MAX_QUEUED_BYTES = 4 * MAX_FRAME_BYTES
"""A peer that leaves more than this in our buffer has stopped."""
HIGH_WATER_BYTES = 65_536
"""Bytes that may be queued before `drained` waits."""
CLOSE_SECONDS = 0.3


class Link(Generic[SentT, ReceivedT]):
    """Made by `open_link`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any, hello: Hello) -> None:
        self._reader = reader
        self._writer = writer
        self._codec: Codec[SentT | Hello] = Codec()
        self._assembler: Assembler[ReceivedT] = Assembler(receives, hello)
        self._received: deque[ReceivedT] = deque()
        self._deaf = False
        self.post(hello)

    def post(self, message: SentT | Hello) -> None:
        """Queue a message without waiting; a link that has ended takes it and forgets it.

        Raises:
            FrameError: it is too large.
        """
        frame = self._codec.encode(message)
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self._deaf = True
            transport.abort()
            return
        self._writer.write(frame)

    async def drained(self) -> None:
        """Wait until the peer has taken most of what is queued; for ever when it is gone, which `receive` tells."""
        try:
            await self._writer.drain()
        except OSError:
            await anyio.sleep_forever()

    async def receive(self) -> ReceivedT:
        """The next message.

        Raises:
            PeerGone: the peer has ended.
            FrameError: it sent what is no message, or has stopped reading.
        """
        while not self._received:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise FrameError("the other end has stopped reading") if self._deaf else self._assembler.end()
            self._received.extend(self._assembler.feed(data))
        return self._received.popleft()

    async def aclose(self) -> None:
        """Let what is queued go out, for a moment, and close. Idempotent."""
        self._writer.close()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS), contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._writer.transport.abort()


async def open_link(peer: socket.socket, receives: Any, version: str) -> Link[Any, Any]:
    """Take a connected socket over, also on failure, and say Hello. A caller that is cancelled meanwhile owns the link.

    Args:
        receives: union of the messages that may come.
    """
    peer.setblocking(False)
    try:
        with anyio.CancelScope(shield=True):  # what uvloop before 0.23 is cancelled over it closes, and so would we
            reader, writer = await asyncio.open_unix_connection(sock=peer, limit=READ_BYTES)
    except BaseException:
        peer.close()
        raise
    writer.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
    return Link(reader, writer, receives, Hello(link="front", version=version))


__all__ = ["FrameError", "Link", "PeerGone", "open_link"]
