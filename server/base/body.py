"""Request bodies: read with a cap and a deadline, then decoded as strict JSON into one typed Struct."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import msgspec

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body_room import Reservation
from troupellm.server.base.encodings import decode, encoding_of
from troupellm.server.base.errors import ClientGone, body_timeout, invalid_json, too_large, unsupported_media_type
from troupellm.server.base.exchange import Exchange, Message
from troupellm.server.base.surrogates import without_halves
from troupellm.server.base.threads import offload
from troupellm.server.base.unknown_fields import UnknownFields

MAX_DEPTH = 64
MAX_CONTAINERS = 200_000
"""Objects and lists of one body: like short strings they cost far more than their bytes, and hold up all threads."""
MAX_STRINGS = 500_000
INLINE_BYTES = 65_536
"""Larger bodies are decoded on a thread, so that they do not hold the event loop."""
PARALLEL_DECODES = 1
"""Large bodies that are decoded at once: each takes several times its bytes meanwhile, and the interpreter's lock."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


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


async def decode_body(
    raw: bytes,
    kind: type[StructT],
    unknown: UnknownFields | None = None,
    *,
    limiter: anyio.CapacityLimiter | None = None,
) -> StructT:
    """Decode into `kind`; the time is linear in the size. Fields that `kind` does not have are reported to `unknown`.

    Args:
        limiter: how many large bodies are decoded at once.

    Raises:
        InvalidRequest: not strict JSON, too many strings, objects or lists, nested deeper than 64, a repeated key, or
            not what the API takes.
    """
    if len(raw) > INLINE_BYTES:
        return await offload(decode_json, raw, kind, unknown, limiter=limiter)
    return decode_json(raw, kind, unknown)


def decode_json(raw: bytes, kind: type[StructT], unknown: UnknownFields | None = None) -> StructT:
    bare = _bare(raw)
    try:
        tree = _tree(raw, mend=getattr(kind, "HOLDS_CONVERSATION", False))
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = "the text is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).split(" - at")[0]
        raise invalid_json(f"the request body is not valid JSON: {text}") from None
    keys = _count_keys(tree)
    # JSON text has one colon outside strings per key, and a decoded object keeps one of equal keys.
    if keys != bare.count(b":"):
        raise invalid_json("the request body has an object with the same key twice")
    if unknown is not None and hasattr(kind, "__struct_fields__"):
        unknown.report(tree, kind)
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind, "the request body") from None


def _tree(raw: bytes, *, mend: bool) -> Any:
    """The value of a JSON text.

    Args:
        mend: half of a surrogate pair, which no text can have, stands for U+FFFD.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        whole = without_halves(raw) if mend else None
        if whole is None:
            raise
    return msgspec.json.decode(whole)


def _bare(raw: bytes) -> bytes:
    """The text without its strings.

    Raises:
        InvalidRequest: more strings, objects or lists than a body may have.
    """
    # Two for each string, or one where it ends with a backslash of its own; quotes inside of strings are none of them.
    if raw.count(b'"') - raw.count(b'\\"') > 2 * MAX_STRINGS:
        raise invalid_json(f"the request body has more than {MAX_STRINGS} strings")
    # Without escapes every other part between quotes is outside of strings. Each of these calls holds the interpreter's
    # lock for a few milliseconds per 8 MiB; a regular expression holds it for ten times as long, in one call.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = b"".join(unescaped.split(b'"')[::2])
    if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
        raise invalid_json(f"the request body has more than {MAX_CONTAINERS} objects and lists")
    return bare


def _count_keys(tree: Any) -> int:
    """How many keys all objects have together.

    Raises:
        InvalidRequest: nested too deeply.
    """
    keys, depth, level = 0, 0, [tree]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        deeper: list[Any] = []
        for node in level:
            if type(node) is dict:
                keys += len(node)
                deeper.extend(value for value in node.values() if type(value) in (dict, list))
            elif type(node) is list:
                deeper.extend(value for value in node if type(value) in (dict, list))
        level = deeper
    return keys


def _too_deep() -> InvalidRequest:
    return invalid_json(f"the request body is nested more than {MAX_DEPTH} levels deep")


def invalid_field(error: msgspec.ValidationError, kind: type, whole: str) -> InvalidRequest:
    """An error of decoding into `kind`, with its path as the API's `param`; `whole` is what was decoded."""
    reason, _, location = with_allowed_values(error, kind).partition(" - at ")
    path = location.rpartition("$")[2].rstrip("`").lstrip(".").removesuffix("[...]")
    missing = re.search(r"missing required field `(\w+)`", reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"{whole}: {reason}", code="invalid_type")
    return InvalidRequest(f"{path}: {reason}", param=path, code="invalid_type")


def _check_media_type(exchange: Exchange, media: Sequence[str], *, encoded: bool) -> None:
    media_type = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
    if media_type not in media:
        raise unsupported_media_type(f"the request needs the header Content-Type: {' or '.join(media)}")
    if not encoded and encoding_of(exchange.header(b"content-encoding")) is not None:
        raise unsupported_media_type("compressed bodies are not accepted here")
