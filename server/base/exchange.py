"""One HTTP request and its response, over ASGI's two callables."""

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint

from troupellm.protocol.api.caller import NOBODY, Caller
from troupellm.protocol.quota import Quota
from troupellm.server.base.body_room import Reservation
from troupellm.server.base.errors import ClientGone, ErrorAnswer, ErrorShape, Headers, headers_too_large, in_stream
from troupellm.server.base.ratelimits import ratelimit_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"
"""JSON texts, one a line."""
MAX_HEADER_BYTES = 16_384
"""Names and values of all headers, their overhead, and the request target."""
HEADER_OVERHEAD = 32
"""Bytes that each header counts beside its text, as in HTTP/2: it bounds their number."""
PROMPT_TOKEN_BYTES = 64
"""A token of a prompt explains at most so many bytes of a body and of its decoded values."""
CHUNK_BYTES = 32_768
"""Of a whole answer, so that no more of it is copied than its client reads."""
SWIFT_SENDS = 32
"""So many sends may end at once before others get their turn."""
CHUNKS = "troupellm.pieces"
"""Name of the extension that writes chunks of a body at once."""
CLIENT_CLOSED = 499
"""Only ever logged and counted: the client left before the answer was complete."""
_SCHEMES = (b"http://", b"https://")


class Chunks(Protocol):
    """An extension that a server may offer beside `send`: chunks of a body that has begun are written
    at once. Middleware that changes or counts bodies has to take it out of the scope."""

    def ready(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class Exchange:
    """Request and response of one HTTP call. A response is sent whole (`respond`) or in chunks (`start`, `write`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, request_id: str, write_timeout: float) -> None:
        self.method: str = scope["method"]
        self.raw_path, self.authority = _target(scope)
        """As the client spelt it; the app takes off the prefix under which it is mounted. And the host in the target
        itself (it overrides Host then); None for a plain path."""
        self.raw_query: bytes = scope.get("query_string") or b""
        self.query: Any = None
        """The decoded query, of the type that the route names."""
        self.path_values: Mapping[str, str] = {}
        """The values in the path where the route has `{names}`."""
        self.error_shape: ErrorShape = "openai"
        self.error_event: Callable[[ErrorAnswer], bytes] | None = None
        """How a stream that has begun tells of an error, where its API has a way of its own."""
        self.further_headers: Headers = ()
        """Headers of every answer, good or bad."""
        self.headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self.client: str = (scope.get("client") or ("-",))[0]
        self.server: str = (scope.get("server") or ("127.0.0.1",))[0]
        """The address that the client has connected to."""
        self.request_id = request_id
        self.body_bytes: int | None = None
        """Size of the body as it was decoded; None until it has been read."""
        self.tail = ""
        self.failure: tuple[str, str | None] | None = None
        """Code and param of the error that was answered, for the access line."""
        self.route = ""
        """Path of the route that answers; "" before it is known, and where there is none."""
        self.caller: Caller = NOBODY
        """The owner of the request, as the key check found it."""
        self.adapter = ""
        """The LoRA adapter that the request names as its model, once that was checked."""
        self.quota: Quota | None = None
        """The rest of the key's limits when its request was admitted."""
        self.began = time.monotonic()
        self.prompt_tokens: int | None = None
        """None where nothing was generated."""
        self.completion_tokens: int | None = None
        self.first_token_seconds: float | None = None
        self.status = 0
        """0 until the response has started."""
        self.streaming = False
        self.gone = False
        self.finished = False
        self.skipped: list[str] = []
        """Names in the header x-troupellm-skipped."""
        self.renames: dict[str, str] = {}
        """The API's own names of sampling parameters, for error texts."""
        self.cancel_scope = anyio.CancelScope()
        """Ends the whole exchange; used at the end of a drain."""
        self.reading = anyio.CancelScope()
        """Around the reading of the body; a drain that begins meanwhile ends it, since the request will be refused."""
        self.room: Reservation | None = None
        """The room of its body; None where the body has none, such as a line of a batch."""
        self._swift_sends = 0
        self._receive = receive
        self._send = send
        self._write_timeout = write_timeout or None
        self._chunks: Chunks | None = (scope.get("extensions") or {}).get(CHUNKS)
        self._http1 = str(scope.get("http_version", "1.1")).startswith("1")

    @property
    def key(self) -> str:
        """Name of the API key that was given; "" without keys."""
        return self.caller.name

    @property
    def owner(self) -> str:
        """Whose it is what outlives this request."""
        return self.caller.owner

    def header_values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    def header(self, name: bytes) -> str | None:
        values = self.header_values(name)
        return values[0].decode("latin-1") if values else None

    async def add_bytes(self, num_bytes: int, timeout: float) -> None:
        """Count what the server adds to the body, such as the conversation that it continues, and take room for it.
        Arguments and errors are those of `Reservation.add`."""
        self.body_bytes = (self.body_bytes or 0) + num_bytes
        if self.room is not None and num_bytes:
            await self.room.add(num_bytes, timeout)

    def prompt_made(self, tokens: int) -> None:
        """The engine has the whole prompt; see `prompt_taken`."""
        self.prompt_tokens = tokens
        self.prompt_taken(tokens)

    def prompt_taken(self, tokens: int) -> None:
        """Give back the room of a prompt that the engine has, as far as the prompt explains the body's size: the engine
        bounds its prompts."""
        if self.room is not None:
            self.room.release(tokens * PROMPT_TOKEN_BYTES)

    def delivered(self, tokens: int) -> None:
        """For the access line: so many more tokens go to the client now."""
        if tokens:
            self.completion_tokens = (self.completion_tokens or 0) + tokens
            if self.first_token_seconds is None:
                self.first_token_seconds = time.monotonic() - self.began

    @property
    def final_status(self) -> int:
        """The status for log and metrics."""
        return CLIENT_CLOSED if self.gone else self.status

    async def receive(self) -> Message:
        return await self._receive()

    async def watch(self, scope: anyio.CancelScope) -> None:
        """Cancel `scope` as soon as the client leaves, or closes its sending half. Only once the body has been read."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = not self.finished
                scope.cancel()
                return

    async def respond(self, status: int, body: bytes, headers: Headers = (), content_type: bytes = JSON) -> None:
        await self.start(status, content_type, (*headers, (b"content-length", str(len(body)).encode())))
        if self.method == "HEAD":
            body = b""
        for start in range(0, len(body) or 1, CHUNK_BYTES):
            await self.write(body[start : start + CHUNK_BYTES], last=start + CHUNK_BYTES >= len(body))

    async def respond_error(self, answer: ErrorAnswer) -> None:
        """Answer with an error, or end a stream that has begun with an error event."""
        self.failure = (answer.code, answer.param)
        if self.status == 0:
            await self.respond(answer.status, answer.body, answer.headers)
        elif self.streaming and not self.finished:
            if self.error_event is not None:
                await self.write(self.error_event(answer), last=True)
            elif self.error_shape == "anthropic":
                await self.write(b"event: error\ndata: " + answer.body + b"\n\n", last=True)
            else:
                await self.write(b"data: " + in_stream(answer) + b"\n\ndata: [DONE]\n\n", last=True)

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        sent = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        if self.error_shape == "anthropic":  # where its clients look for it
            sent.append((b"request-id", self.request_id.encode()))
        if status == 200 and self.quota is not None:
            sent += ratelimit_headers(self.quota, anthropic=self.error_shape == "anthropic")
        sent += self.further_headers
        sent += [(name, value) for name, value in headers if self._http1 or name != b"connection"]
        self.status = status
        self.streaming = content_type in (EVENTS, LINES)
        begun = _begin(self._send({"type": "http.response.start", "status": status, "headers": sent}))
        await (checkpoint() if begun is None else self._end_in_time(*begun))

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a chunk of the body; the last one ends the response.

        Raises:
            ClientGone: the client left, or did not read for the whole write timeout.
        """
        if self.gone:
            raise ClientGone
        self.finished = last
        data = self._checked(data)
        begun = _begin(self._send({"type": "http.response.body", "body": data, "more_body": not last}))
        if begun is not None:
            await self._end_in_time(*begun)
            return
        self._swift_sends += 1
        if self._swift_sends >= SWIFT_SENDS:
            self._swift_sends = 0
            await checkpoint()  # a send to a client that reads, or that has left, never waits

    @property
    def swift(self) -> bool:
        """Chunks may be written without waiting for anybody, whenever `ready` says so."""
        return self._chunks is not None

    def ready(self) -> bool:
        """The body has begun, and its client has taken what was written of it."""
        return self._chunks is not None and not (self.gone or self.finished) and self._chunks.ready()

    def write_now(self, data: bytes) -> None:
        """Send a chunk of the body when `ready`."""
        assert self._chunks is not None
        self._chunks.write(self._checked(data))

    def _checked(self, data: bytes) -> bytes:
        return _in_lines_for_all(data) if self.streaming and not data.isascii() else data

    async def _end_in_time(self, steps: "_Steps", waits_for: object) -> None:
        """Most sends end without waiting for anybody: only those that do not are given a deadline, which costs as much
        as the send."""
        with anyio.move_on_after(self._write_timeout) as deadline:
            await _Rest(steps, waits_for)
        if deadline.cancelled_caught:
            self.gone = True
            raise ClientGone


_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""NEL, line and paragraph separator in UTF-8, and as JSON spells them in ASCII."""


def _in_lines_for_all(events: bytes) -> bytes:
    """JSON may hold these three as they are and event streams do not end a line at them, but much that reads lines of
    text does (`str.splitlines`, `aiter_lines` of httpx), and so would cut an event in two."""
    for raw, escaped in _LINE_ENDS:
        events = events.replace(raw, escaped)
    return events


_Steps = Generator[object, object, None]


def _begin(awaitable: Awaitable[None]) -> tuple[_Steps, object] | None:
    """Run an awaitable until it waits for something; None when it did not have to."""
    steps = awaitable.__await__()
    try:
        return steps, next(steps)
    except StopIteration:
        return None


class _Rest:
    """An awaitable from its first wait on."""

    def __init__(self, steps: _Steps, waits_for: object) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> _Steps:
        waits_for = self._waits_for
        while True:
            try:
                sent = yield waits_for
            except BaseException as thrown:
                step = partial(self._steps.throw, thrown)
            else:
                step = partial(self._steps.send, sent)
            try:
                waits_for = step()
            except StopIteration:
                return


def check_size(exchange: Exchange) -> None:
    """
    Raises:
        HttpError: 431, the request's head is too large, also if the server in front let it through.
    """
    size = len(exchange.raw_path) + len(exchange.raw_query)
    size += sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in exchange.headers)
    if size > MAX_HEADER_BYTES:
        raise headers_too_large(MAX_HEADER_BYTES)


def _target(scope: Scope) -> tuple[bytes, str | None]:
    """The path of the request target, still percent-encoded, and the authority of one in absolute form."""
    raw: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    if raw[:8].lower().startswith(_SCHEMES):
        authority, _, path = raw.partition(b"://")[2].partition(b"/")
        return b"/" + path, authority.decode("latin-1")
    return raw, None
