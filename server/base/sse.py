"""Server-sent events, framed exactly as OpenAI clients expect.

One event is `data: <one line of JSON>` and a blank line; nothing else has a blank line, there are no ids, names or
retry lines, and the stream ends with `data: [DONE]`. A comment keeps silent connections alive. The cost is per send,
not per byte, so all deltas of one wake of a stream go out in one send.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import msgspec

from troupellm.server.base.exchange import EVENTS, Exchange

KEEP_ALIVE = b": keep-alive\n"
DONE = b"data: [DONE]\n\n"
HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

_encode = msgspec.json.Encoder().encode


class Source(Protocol):
    """A stream or a turn that is open."""

    def set_sink(self, sink: "PieceWriter") -> None: ...


def event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class EventStream:
    """Serialises the senders of one response. Made by `open_events`.

    The status line waits for the first chunk of the body, so that what goes wrong before the first token is a real
    status and not an event in a success. A request that has to wait for longer than the keep-alive interval gets its
    200 with the first comment: then proxies must see something, and clients that have left must be noticed.
    """

    def __init__(self, exchange: Exchange, media: bytes = EVENTS) -> None:
        self._exchange = exchange
        self._media = media
        self.delivered = exchange.delivered
        self._busy = False
        self._closed = False
        self._queue: deque[anyio.Event] = deque()
        self._last = time.monotonic()

    async def send(self, data: bytes) -> None:
        """Send whole events. Returns when the transport has room again."""
        if self._busy:
            await self._take_turn()
        self._busy = True
        try:
            if not self._exchange.status:
                await self._begin()
            await self._exchange.write(data)
            self._last = time.monotonic()
        finally:
            self._end_turn()

    def write_at_once(self, source: Source, encode: Callable[[list[Any]], bytes]) -> None:
        """Deltas of `source` are written at once, without a task in between, while the client keeps up; the
        caller reads the rest. Only behind our own API process, elsewhere the caller gets everything."""
        if self._exchange.swift:
            source.set_sink(PieceWriter(self, encode))

    @property
    def free(self) -> bool:
        """Whether events can be written at once."""
        return not (self._busy or self._closed) and self._exchange.ready()

    def write_now(self, data: bytes) -> None:
        """Write whole events while `free`."""
        self._exchange.write_now(data)
        self._last = time.monotonic()

    async def finish(self, data: bytes, end: bytes = DONE) -> None:
        """Send the last events and what marks the end, and end the response."""
        await self._take_turn()
        try:
            await self._begin()
            await self._exchange.write(data + end, last=True)
        finally:
            self._end_turn()

    async def _take_turn(self) -> None:
        """A lock in order of arrival that costs no time while no other task sends, which is nearly always."""
        if not self._busy:
            self._busy = True
            return
        event = anyio.Event()
        self._queue.append(event)
        try:
            await event.wait()
        except BaseException:  # a cancelled sender passes the turn on, if it had got it already
            if event.is_set():
                self._end_turn()
            else:
                self._queue.remove(event)
            raise

    def _end_turn(self) -> None:
        if self._queue:  # the turn is handed over and never free meanwhile: who waits has older chunks than who comes
            self._queue.popleft().set()
        else:
            self._busy = False

    def close(self) -> None:
        """Nothing is written at once any more."""
        self._closed = True

    async def _begin(self) -> None:
        if not self._exchange.status:
            await self._exchange.start(200, self._media, HEADERS)

    async def keep_alive(self, interval: float, sign: bytes) -> None:
        """Send a sign of life whenever nothing was sent for `interval` seconds."""
        while True:
            silent = time.monotonic() - self._last
            if silent >= interval:
                await self.send(sign)
            else:
                await anyio.sleep(interval - silent)


class PieceWriter:
    """Writes the deltas of one stream as events, without a task in between."""

    __slots__ = ("_encode", "_events")

    def __init__(self, events: EventStream, encode: Callable[[list[Any]], bytes]) -> None:
        self._events = events
        self._encode = encode

    def ready(self) -> bool:
        return self._events.free

    def take(self, deltas: list[Any]) -> None:
        if data := self._encode(deltas):
            self._events.write_now(data)


@asynccontextmanager
async def open_events(
    exchange: Exchange, keep_alive_interval: float, keep_alive: bytes = KEEP_ALIVE, media: bytes = EVENTS
) -> AsyncIterator[EventStream]:
    """A response that begins with the first thing sent: from then on errors are events. Ends the keep-alive, not the
    response."""
    events = EventStream(exchange, media)
    async with anyio.create_task_group() as group:
        if keep_alive_interval > 0:
            group.start_soon(events.keep_alive, keep_alive_interval, keep_alive)
        try:
            yield events
        finally:
            events.close()
            group.cancel_scope.cancel()


class ChunkEncoder:
    """Encodes the chunks of one response; what never changes is encoded once.

    `text_before` and `text_after` are the JSON of a choice around its text, after `"index":N,`.
    """

    def __init__(
        self,
        *,
        response_id: str,
        kind: str,
        created: int,
        model: str,
        include_usage: bool,
        text_before: bytes,
        text_after: bytes,
    ) -> None:
        fields = _encode({"id": response_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + fields[:-1] + b',"choices":['
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._text_before = text_before
        self._text_after = text_after + b"}]" + self._end
        self._prefixes: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The common chunk: a chunk of text for one choice."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._head + _encode({"index": index})[:-1] + b"," + self._text_before
            self._prefixes[index] = prefix
        return prefix + _encode(text) + self._text_after

    def choice(
        self,
        choice: object,
        *,
        fingerprint: str | None = None,
        usage: object = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """A chunk with any choice object."""
        return self._chunk(_encode(choice), fingerprint, usage, prompt_token_ids)

    def usage(self, usage: object, *, fingerprint: str | None = None) -> bytes:
        """The extra chunk that has usage and no choices."""
        return self._chunk(b"", fingerprint, usage)

    def _chunk(
        self, choices: bytes, fingerprint: str | None, usage: object, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        mark = b"" if fingerprint is None else b',"system_fingerprint":' + _encode(fingerprint)
        if prompt_token_ids is not None:
            mark += b',"prompt_token_ids":' + _encode(prompt_token_ids)
        end = self._end if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        return self._head + choices + b"]" + mark + end
