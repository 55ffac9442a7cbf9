"""Request bodies: read with a cap and a deadline, and decoded where they are compressed.

Compressed bodies, gzip and zstd, are decoded under the limit of plain ones. A few kilobytes can decode to gigabytes, so
no more than a chunk beyond the limit is ever made.
"""

import io
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body_room import Reservation
from troupellm.server.base.errors import ClientGone, body_timeout, too_large, unsupported_media_type
from troupellm.server.base.exchange import Exchange, Message
from troupellm.server.base.threads import offload

ENCODINGS = ("gzip", "zstd")
CHUNK_BYTES = 65_536
MAX_WINDOW_BYTES = 8 * 2**20
"""Memory that a zstd body may ask its reader for: what RFC 9659 allows on the web."""
MAX_MEMBERS = 64
"""Compressed streams behind each other in one body; each costs as much as a kilobyte."""
_GZIP = 16 + zlib.MAX_WBITS


def encoding_of(header: str | None) -> str | None:
    """The encoding that a Content-Encoding header names; None for a plain body.

    Raises:
        HttpError: 415, an encoding that is not decoded here, or several.
    """
    name = (header or "identity").strip().lower()
    if name == "identity":
        return None
    name = name.removeprefix("x-")
    if name not in ENCODINGS:
        raise unsupported_media_type(f"Content-Encoding must be {' or '.join(ENCODINGS)}, or absent", ENCODINGS)
    return name


def decode(raw: bytes, encoding: str, limit: int) -> bytes:
    """The plain body. Slow for large ones.

    Args:
        encoding: one of `ENCODINGS`.
        limit: bytes of the plain body.

    Raises:
        HttpError: 413, it is larger than `limit`.
        InvalidRequest: the bytes are damaged, or end too early.
    """
    return _gunzip(raw, limit) if encoding == "gzip" else _unzstd(raw, limit)


def _gunzip(raw: bytes, limit: int) -> bytes:
    chunks, size, members = list[bytes](), 0, 1
    member = zlib.decompressobj(_GZIP)
    for start in range(0, len(raw), CHUNK_BYTES):  # in parts, since what was not read yet is copied after each chunk
        part = raw[start : start + CHUNK_BYTES]
        while part:
            if member.eof:
                member, members = zlib.decompressobj(_GZIP), members + 1
                if members > MAX_MEMBERS:
                    raise _damaged("gzip")
            try:
                chunks.append(member.decompress(part, min(CHUNK_BYTES, limit + 1 - size)))
            except zlib.error:
                raise _damaged("gzip") from None
            size += len(chunks[-1])
            if size > limit:
                raise too_large(limit)
            part = member.unused_data if member.eof else member.unconsumed_tail
    if not member.eof:
        raise _damaged("gzip")
    return b"".join(chunks)


def _unzstd(raw: bytes, limit: int) -> bytes:
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        _check_unzstd_size(context.stream_reader(io.BytesIO(raw), read_across_frames=True), limit)
        chunks, rest = list[bytes](), raw
        for _ in range(MAX_MEMBERS):  # only this reader tells whether a frame is whole
            frame = context.decompressobj()
            chunks.append(frame.decompress(rest))
            rest = frame.unused_data
            if not frame.eof:
                break
            if not rest:
                return b"".join(chunks)
    except zstandard.ZstdError:
        pass
    raise _damaged("zstd")


def _check_unzstd_size(reader: Any, limit: int) -> None:
    size = 0
    while chunk := reader.read(CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            raise too_large(limit)


def _damaged(encoding: str) -> InvalidRequest:
    return InvalidRequest(f"the request body is no whole {encoding} data", code="invalid_encoding")


INLINE_BYTES = 65_536
"""Larger bodies are decoded on a thread, so that they do not hold the event loop."""


class BodyReader:
    """Reads a body chunk by chunk, for those who do not want it whole."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        limit: int,
        timeout: float,
        slowest: float = math.inf,
        media: Sequence[str] = ("application/json",),
        encoded: bool = False,
    ) -> None:
        """
        Args:
            limit: bytes.
            timeout: seconds for the whole body; 0 waits for ever.
            slowest: bytes per second. Received bytes extend the deadline by their time at this speed.
            media: the media types that are taken.
            encoded: the body may be compressed; the limit is that of the compressed bytes.

        Raises:
            HttpError: 415 media type or encoding, 413 too large by its declared length.
        """
        _check_media_type(exchange, media, encoded=encoded)
        self._exchange = exchange
        self._limit = limit
        self._timeout = timeout
        self._slowest = slowest
        self.begin()
        self._size = 0
        self._more = True
        declared = exchange.header(b"content-length")
        if declared is not None and declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
            raise too_large(limit)

    def begin(self) -> None:
        """The timeout begins now."""
        self._until = anyio.current_time() + self._timeout if self._timeout else math.inf

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside the block is the server's, and does not count for the timeout."""
        began = anyio.current_time()
        try:
            yield
        finally:
            self._until += anyio.current_time() - began

    async def read(self) -> bytes | None:
        """The next chunk; None at the end.

        Raises:
            HttpError: 413 too large, 408 too slow.
            ClientGone: the client left first.
        """
        if not self._more:
            return None
        message: Message = {}
        more = self._size / self._slowest
        with anyio.CancelScope(deadline=self._until + more) as deadline:
            message = await self._exchange.receive()
        if deadline.cancelled_caught:
            raise body_timeout(self._timeout + more)
        if message["type"] == "http.disconnect":
            self._exchange.gone = True
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        if self._size > self._limit:
            raise too_large(self._limit)
        self._more = message.get("more_body", False)
        return chunk


def is_large(exchange: Exchange) -> bool:
    """Whether going through the whole body holds up the event loop, as far as its head tells."""
    declared = declared_bytes(exchange)
    return declared is None or declared > INLINE_BYTES


def declared_bytes(exchange: Exchange) -> int | None:
    """The size of the body without its compression, or as its head declares it; None where that is not known."""
    if exchange.body_bytes is not None:
        return exchange.body_bytes
    declared = exchange.header(b"content-length") or ""
    return int(declared) if declared.isdecimal() and len(declared) <= 18 else None


def most_bytes(exchange: Exchange, limit: int) -> int:
    """The most that a body can have, as far as its head tells; a compressed one may be as large as any."""
    if encoding_of(exchange.header(b"content-encoding")) is not None:
        return limit
    declared = exchange.header(b"content-length") or ""
    return min(int(declared), limit) if declared.isdecimal() and len(declared) <= 18 else limit


async def read_body(exchange: Exchange, *, limit: int, timeout: float, reservation: Reservation | None = None) -> bytes:
    """Read the whole body, and decode it where it is compressed. Arguments and errors are those of `BodyReader` and
    `Reservation.take`.

    Args:
        reservation: its room, which it takes as its bytes arrive.

    Raises:
        InvalidRequest: a compressed body is damaged.
    """
    encoding = encoding_of(exchange.header(b"content-encoding"))
    reader = BodyReader(exchange, limit=limit, timeout=timeout, encoded=encoding is not None)
    chunks, size = [], 0
    while (chunk := await reader.read()) is not None:
        chunks.append(chunk)
        size += len(chunk)
        if reservation is not None:
            with reader.paused():
                await reservation.grow(size, timeout)
    raw = b"".join(chunks)
    if encoding is not None:
        if reservation is not None:
            await reservation.enter(timeout)
        raw = await offload(decode, raw, encoding, limit)
    if reservation is not None:
        reservation.shrink(len(raw))
    exchange.body_bytes = len(raw)
    return raw


def _check_media_type(exchange: Exchange, media: Sequence[str], *, encoded: bool) -> None:
    media_type = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
    if media_type not in media:
        raise unsupported_media_type(f"the request needs the header Content-Type: {' or '.join(media)}")
    if not encoded and encoding_of(exchange.header(b"content-encoding")) is not None:
        raise unsupported_media_type("compressed bodies are not accepted here")
