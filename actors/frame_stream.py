"""The awaiting end of a framed connection, over any anyio byte stream."""

from typing import Any, Generic

import anyio
from anyio.abc import ByteStream

from troupellm.protocol.frames import (
    MAX_FRAME_BYTES,
    READ_BYTES,
    Assembler,
    Codec,
    Hello,
    PeerGone,
    ReceivedT,
    SentT,
)


class FrameStream(Generic[SentT, ReceivedT]):
    """Owns the stream. One task may send while another one receives; a batch of messages costs one write."""

    def __init__(self, stream: ByteStream, receives: Any, hello: Hello, *, limit: int = MAX_FRAME_BYTES) -> None:
        """receives: union of the message types that may come; hello: said here, and expected of the peer."""
        self._stream = stream
        self._codec: Codec[SentT | Hello] = Codec(limit=limit)
        self._assembler: Assembler[ReceivedT] = Assembler(receives, hello, limit=limit)
        self._hello = hello

    async def greet(self) -> None:
        """Say Hello; the peer's own is read before its first message. Raises PeerGone."""
        await self._write(self._codec.encode(self._hello))

    async def send(self, *messages: SentT) -> None:
        """Waits while the peer does not read. Cancelled inside, the connection is of no more use.

        Raises:
            PeerGone: the peer has closed.
            FrameError: a message is too large.
        """
        await self._write(b"".join([self._codec.encode(message) for message in messages]))

    async def receive(self) -> list[ReceivedT]:
        """At least one message: all that have come, in order. Being cancelled loses nothing.

        Raises:
            PeerGone: the peer has closed, perhaps inside a frame.
            FrameError: what came is no message; the connection is of no more use.
        """
        messages: list[ReceivedT] = []
        while not messages:
            try:
                data = await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                raise self._assembler.end() from None
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                raise PeerGone("the connection is broken") from None
            messages = self._assembler.feed(data)
        return messages

    async def aclose(self) -> None:
        """Idempotent."""
        await self._stream.aclose()

    async def _write(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise PeerGone("the connection is broken") from None
