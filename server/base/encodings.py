"""Compressed request bodies: gzip and zstd, decoded under the limit of plain bodies.

A few kilobytes can decode to gigabytes, so no more than a chunk beyond the limit is ever made.
"""

import io
import zlib
from typing import Any

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.errors import too_large, unsupported_media_type

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
