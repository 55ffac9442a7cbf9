"""Frames over a socket between two of our own processes: a length, then one msgpack message.

Little-endian length of four bytes, checked before anything is allocated for it; the first frame of each side names
protocol and version. What is not understood ends the link: there is no way back into step with a peer that is not us.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import msgspec

from troupellm.protocol.errors import TroupeError

MAX_FRAME_BYTES = 64 * 2**20
MAX_QUEUED_BYTES = 4 * MAX_FRAME_BYTES
"""A peer that leaves more than this in our buffer has stopped."""
CLOSE_SECONDS = 0.3
HIGH_WATER_BYTES = 65_536
"""What may be queued before `drained` waits."""
_LENGTH = struct.Struct("<I")
_VERSION = 1
_MAGIC = b"troupellm-front"
MessageT = TypeVar("MessageT")


class LinkBroken(TroupeError):
    """The peer does not speak our protocol, or has stopped reading."""

    default_code = "link_broken"


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    magic: bytes
    version: int
    release: str


class Link(Generic[MessageT]):
    """Sends any message, receives those of one type. Made by `open_link`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind)
        self.broken: LinkBroken | None = None

    def post(self, message: Any) -> None:
        """Queue a message without waiting; a link that has ended takes it and forgets it."""
        self._write(self._encode(message))

    async def drained(self) -> None:
        """Wait until the peer has taken most of what is queued; for ever when the link has ended."""
        try:
            await self._writer.drain()
        except OSError:
            await asyncio.Event().wait()

    async def receive(self) -> MessageT | None:
        """The next message; None when the peer has ended.

        Raises:
            LinkBroken: it sent what is no message.
        """
        payload = await self._read()
        if payload is None:
            return None
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LinkBroken(f"a frame of {len(payload)} bytes is no message: {error}") from None

    async def aclose(self) -> None:
        """Let what is queued go out, for a moment, and close."""
        self._writer.close()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS), contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._writer.transport.abort()

    async def greet(self, release: str) -> None:
        """
        Raises:
            LinkBroken: the peer is something else, or of another release.
        """
        self._write(self._encode(_Hello(_MAGIC, _VERSION, release)))
        payload = await self._read()
        if payload is None:
            raise LinkBroken("the peer ended before it said a word")
        try:
            hello = msgspec.msgpack.decode(payload, type=_Hello)
        except msgspec.DecodeError:
            raise LinkBroken("the peer does not speak this protocol") from None
        if (hello.magic, hello.version, hello.release) != (_MAGIC, _VERSION, release):
            raise LinkBroken("the peer is of another release: both sides must be installed together")

    def _write(self, payload: bytes) -> None:
        if len(payload) > MAX_FRAME_BYTES:
            raise LinkBroken(f"a message of {len(payload)} bytes is too large for a frame")
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self.broken = LinkBroken("the peer has stopped reading")
            transport.abort()
            return
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def _read(self) -> bytes | None:
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise LinkBroken(f"a frame of {length} bytes was announced; at most {MAX_FRAME_BYTES} are taken")
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise LinkBroken("the peer ended in the middle of a frame") from None
        except ConnectionError:
            pass
        if self.broken is not None:
            raise self.broken
        return None


async def open_link(peer: socket.socket, kind: Any, release: str) -> Link[Any]:
    """Take a connected socket over, whatever comes of it, and greet.

    Args:
        kind: union of the messages that may come.

    Raises:
        LinkBroken: the peer is not one of ours.
    """
    peer.setblocking(False)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=peer, limit=2 * HIGH_WATER_BYTES)
    except BaseException:
        peer.close()
        raise
    writer.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
    link: Link[Any] = Link(reader, writer, kind)
    try:
        await link.greet(release)
    except BaseException:
        await link.aclose()
        raise
    return link
