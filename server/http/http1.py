"""HTTP/1.1 as strict as a server may be: what two readers could understand differently is refused, and what is slow
or tiny without need is ended."""

import re
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from h11._writers import ChunkedWriter
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Event as StreamEvent, Response
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol

from troupellm.server.base.errors import HttpError, answer, bad_request_head, head_timeout
from troupellm.server.base.exchange import JSON

MAX_HEADERS = 100
MAX_TINY_CHUNKS = 2_048
"""Chunks of a body before their size is looked at."""
LEAST_CHUNK = 32
"""Bytes that more chunks than that must have on average: each costs as much as a kilobyte."""

MOST_DROPPED = 64 * 2**20
"""Bytes of a request that are read and dropped after its answer. A client that sends more loses the connection."""

_BARE_LF = re.compile(rb"(?<!\r)\n")
_FRAMING = (b"content-length", b"transfer-encoding")
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_VERSIONS = (b"1.0", b"1.1")


@dataclass(frozen=True)
class AnsweredEarly(Event):  # type: ignore[misc]
    """A request is answered, and the rest of it still comes."""

    last: bool
    """The answer said that the connection ends with it."""


class Http1(H11Protocol):  # type: ignore[misc]
    """Answers what is not HTTP in the shape of every other error; hypercorn's own answer has no body."""

    h2c = False
    """A client may begin with HTTP/2 at once."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.buffer = self.connection._receive_buffer = StrictBuffer()
        self._chunks = 0
        self._chunk_bytes = 0
        self._in_chunks = False
        """An answer has begun whose body goes out in chunks, and has not ended."""
        self._closed = False
        """The client has left, as reading or writing has shown."""
        self._dropped: int | None = None
        """Bytes of a request that came after its answer; None unless such bytes come now."""

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._closed = True
            await self.can_read.set()  # a further request that is held back has no answer left to wait for
        elif self._dropped is not None and self.connection.their_state is h11.ERROR:
            await self._count_dropped(len(event.data))  # h11 takes no more bytes
            return
        await super().handle(event)

    @property
    def inside_head(self) -> bool:
        """A request has begun, and its head is not complete."""
        return self.connection.their_state is h11.IDLE and len(self.buffer) > 0

    async def refuse_slow_head(self, seconds: float) -> None:
        await self._refuse(head_timeout(seconds))
        await self.send(Closed())

    def takes_chunks(self, stream: object) -> bool:
        """Whether chunks of the answer to `stream` are chunks of a body that has begun and not ended."""
        return self._in_chunks and self.stream is stream

    async def stream_send(self, event: StreamEvent) -> None:
        """hypercorn's, but for chunks of a chunked body: h11 would look at each for longer than sending it takes."""
        if isinstance(event, Body) and isinstance(getattr(self.connection, "_writer", None), ChunkedWriter):
            if event.data and self.connection.our_state is h11.SEND_BODY:
                await self.send(RawData(data=b"%x\r\n%b\r\n" % (len(event.data), event.data)))
            return
        self._in_chunks = False
        await super().stream_send(event)
        if isinstance(event, Response):
            writer = getattr(self.connection, "_writer", None)
            self._in_chunks = self.connection.our_state is h11.SEND_BODY and isinstance(writer, ChunkedWriter)

    async def _handle_events(self) -> None:
        """hypercorn's loop, with chunks of a body that came together handed on together."""
        body: list[bytes] = []
        while True:
            if self.connection.they_are_waiting_for_100_continue:
                await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
            if self.connection.their_state is h11.IDLE:
                self.buffer.skip_empty_line()
            try:
                event = self.connection.next_event()
                if isinstance(event, h11.Data):
                    self._count(event)
                elif isinstance(event, h11.Request):
                    _check_request(event, h2c=self.h2c)
            except h11.RemoteProtocolError as error:
                await self._end(error.error_status_hint)
                break
            if self._dropped is not None:
                if await self._drop(event):
                    continue
                break
            if isinstance(event, h11.Data):
                body.append(bytes(event.data))
                continue
            if body and self.stream is not None:
                await self.stream.handle(Body(stream_id=STREAM_ID, data=b"".join(body)))
            body = []
            if isinstance(event, h11.Request):
                event = _uncompressed(event)
                self._chunks, self._chunk_bytes = 0, 0
                self.buffer.may_skip = True
                await self.send(Updated(idle=False))
                await self._check_protocol(event)
                await self._create_stream(event)
            elif event is h11.PAUSED:
                if self._closed:
                    break
                await self.can_read.clear()
                await self.can_read.wait()
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA or self.stream is None:
                break
            elif isinstance(event, h11.EndOfMessage):
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            else:  # a websocket's data
                await self.stream.handle(event)

    async def _maybe_recycle(self) -> None:
        """hypercorn's, but the rest of a body that is answered early is read and dropped first. A connection that
        closes with unread bytes is reset, and its client may lose the answer (RFC 9112, section 9.6)."""
        last = self.connection.our_state is h11.MUST_CLOSE
        early = self.connection.their_state is h11.SEND_BODY and (last or self.connection.our_state is h11.DONE)
        if not early or self._closed or self.context.terminated.is_set():
            await super()._maybe_recycle()
            return
        self._dropped = 0
        await self._close_stream()
        await self.send(AnsweredEarly(last))

    async def _drop(self, event: Any) -> bool:
        """Take an event of the body that is dropped. False where reading has nothing to go on with."""
        if isinstance(event, h11.Data):
            return await self._count_dropped(len(event.data))
        if not isinstance(event, h11.EndOfMessage):
            return False
        self._dropped = None
        await super()._maybe_recycle()
        return self.connection.our_state is h11.IDLE

    async def _count_dropped(self, size: int) -> bool:
        """Whether the connection stays open for more."""
        self._dropped = (self._dropped or 0) + size
        if self._dropped > MOST_DROPPED:
            await self.send(Closed())
        return self._dropped <= MOST_DROPPED

    async def _send_h11_event(self, event: Any) -> None:
        """hypercorn's, with the reason phrase that proxies and people read in a status line."""
        if isinstance(event, h11.Response) and not event.reason:
            object.__setattr__(event, "reason", _PHRASES.get(event.status_code, b""))
        await super()._send_h11_event(event)

    def _count(self, data: h11.Data) -> None:
        self._chunks += 1
        self._chunk_bytes += len(data.data)
        if self._chunks > MAX_TINY_CHUNKS and self._chunk_bytes < LEAST_CHUNK * self._chunks:
            raise h11.RemoteProtocolError("a body in tiny chunks")

    async def _end(self, status: int) -> None:
        """The peer's bytes are no HTTP: the handler of its request learns that the peer is gone, and writes no more.
        Bytes behind an answer are read and dropped, for the reason that `_maybe_recycle` has."""
        unanswered = self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}
        await self._close_stream()
        if unanswered:
            await self._refuse(bad_request_head(status))
        if self._closed or self.context.terminated.is_set() or not (unanswered or self._dropped is not None):
            await self.send(Closed())
            return
        self._dropped = self._dropped or 0
        await self.send(AnsweredEarly(last=True))

    async def _refuse(self, error: HttpError) -> None:
        shown = answer(error)
        headers = [
            (b"content-type", JSON),
            (b"content-length", str(len(shown.body)).encode()),
            (b"x-request-id", secrets.token_hex(16).encode()),
            *shown.headers,
        ]
        await self.stream_send(Response(stream_id=STREAM_ID, headers=headers, status_code=shown.status))
        await self.stream_send(Body(stream_id=STREAM_ID, data=shown.body))
        await self.stream_send(EndBody(stream_id=STREAM_ID))

    async def _check_protocol(self, event: h11.Request) -> None:
        """HTTP/2 by prior knowledge only: its upgrade header is ignored, as the standard says by now."""
        if _is_http2(event):
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])


class StrictBuffer(ReceiveBuffer):
    """Lines end with CRLF, are never folded, and say once how long the body is."""

    def __init__(self) -> None:
        super().__init__()
        self.may_skip = True
        """No empty line was skipped before the next request line."""

    def skip_empty_line(self) -> None:
        """Before a request line: RFC 9112, section 2.2, has servers ignore one that old clients send behind a body."""
        if self.may_skip and self._data.startswith(b"\r\n"):
            self._extract(2)
            self.may_skip = False

    def is_next_line_obviously_invalid_request_line(self) -> bool:
        """h11's, unless it is the first half of an empty line that may be skipped."""
        if self.may_skip and self._data == b"\r":
            return False
        return bool(super().is_next_line_obviously_invalid_request_line())

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """
        Raises:
            LocalProtocolError: as h11's readers say what is wrong with what came in.
        """
        if self._data[:2] == b"\r\n":
            return super().maybe_extract_lines()
        searched = self._multiple_lines_search
        end = self._data.find(b"\r\n\r\n", max(0, searched - 3))
        whole = end if end >= 0 else len(self._data)
        if _BARE_LF.search(self._data, searched, whole):
            raise h11.LocalProtocolError("a line that does not end with CRLF")
        if end < 0:
            self._multiple_lines_search = whole
            return None
        lines = self._extract(end + 4)[:-4].split(b"\r\n")
        _check_head(lines)
        return list(lines)


def _check_request(event: h11.Request, *, h2c: bool) -> None:
    if event.http_version not in _VERSIONS and not (h2c and _is_http2(event)):
        raise h11.RemoteProtocolError("a version of HTTP that is not spoken here")
    if event.http_version == b"1.0" and any(name == b"transfer-encoding" for name, _ in event.headers):
        raise h11.RemoteProtocolError("HTTP/1.0 has no transfer encodings")


def _uncompressed(event: h11.Request) -> h11.Request:
    """A request without extensions of WebSocket: a compressed message would be decoded before its size is looked at."""
    if not any(name == b"sec-websocket-extensions" for name, _ in event.headers):
        return event
    headers = [(name, value) for name, value in event.headers if name != b"sec-websocket-extensions"]
    return h11.Request(method=event.method, target=event.target, headers=headers, http_version=event.http_version)


def _is_http2(event: h11.Request) -> bool:
    return event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0"


def _check_head(lines: list[bytearray]) -> None:
    if len(lines) > MAX_HEADERS + 1:
        raise h11.LocalProtocolError("too many headers", error_status_hint=431)
    framing = 0
    for line in lines:
        if line.startswith((b" ", b"\t")):
            raise h11.LocalProtocolError("a folded header")
        name, _, value = bytes(line).partition(b":")
        name = name.strip().lower()
        framing += name in _FRAMING
        if name == b"content-length" and not value.strip().isdigit():
            raise h11.LocalProtocolError("the length of the body is no number")
    if framing > 1:
        raise h11.LocalProtocolError("the length of the body is given more than once")
