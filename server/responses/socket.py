"""The responses API over a WebSocket: `response.create` as a text frame, and each event of its stream as another one.

A connection makes one response after another. The server holds its last one, as it holds threads of the messages API,
so that a client that stores nothing sends only its new items, with `previous_response_id`.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import msgspec

from troupellm.protocol.api.caller import Caller
from troupellm.protocol.api.response_events import ResponseCompleted
from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import is_large
from troupellm.server.base.body_room import Reservation, no_room
from troupellm.server.base.errors import ClientGone, answer, flatten
from troupellm.server.base.exchange import EVENTS, Exchange, Message
from troupellm.server.base.json_body import UnknownFields, decode_body
from troupellm.server.base.sse import open_events
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import open_turn
from troupellm.server.responses import create
from troupellm.server.responses.builder import ResponseBuilder, encoded, usage_of
from troupellm.server.responses.items import as_items
from troupellm.server.responses.jobs import Jobs
from troupellm.server.responses.prepare import make_plan
from troupellm.server.storage.kept_items import after_compaction
from troupellm.server.storage.message_threads import read_held
from troupellm.server.storage.responses_rows import Items

MAX_WAITING = 2
"""Frames that may wait behind the one that is answered."""
IDLE_SECONDS = 900.0
"""A connection without a request is closed after so long."""
NORMAL, BINARY, POLICY = 1000, 1003, 1008
"""Codes of closing."""
_CREATE = "response.create"
_ERROR = b'{"type":"error"'
_ENDS = tuple(f'{{"type":"response.{name}"'.encode() for name in ("completed", "incomplete", "failed"))

Send = Callable[[Message], Awaitable[None]]


class SocketRequest(ResponsesRequest, kw_only=True):
    """One frame: the body of POST /v1/responses with a type."""

    type: str
    generate: bool | None = None
    """False: only put the prompt into the prefix cache."""


class _Waiting(msgspec.Struct, eq=False):
    """A frame that was read."""

    raw: bytes | None
    """None: there was no room for it."""
    room: Reservation


class ResponsesSocket:
    """Serves one connection that has been accepted."""

    def __init__(
        self,
        host: ServerState,
        caller: Caller,
        receive: Callable[[], Awaitable[Message]],
        send: Send,
        make_exchange: Callable[[Callable[[], Awaitable[Message]], Send], Exchange],
        answered: Callable[[Exchange], None],
    ) -> None:
        """
        Args:
            make_exchange: an exchange of this connection's caller, between `receive` and `send`.
            answered: told of each exchange when it has ended.
        """
        self._host = host
        self._caller = caller
        self._receive = receive
        self._send = send
        self._make_exchange = make_exchange
        self._answered = answered
        self._jobs = Jobs(host)
        self._unknown = UnknownFields()
        self._gone = anyio.Event()
        self._name = secrets.token_hex(16)
        """Of the connection, among those whose last responses are held."""
        self._last: str | None = None
        """Id of the last response, if its conversation is held, its output included."""
        self._waiting: set[_Waiting] = set()
        """The frame that is answered, and those behind it."""

    async def run(self) -> None:
        """Until the client leaves, or sends what is no request."""
        try:
            await self._serve()
        finally:
            self._forget()
            for frame in self._waiting:
                frame.room.leave()
        if not self._gone.is_set():
            await self._close(NORMAL)

    async def _serve(self) -> None:
        sender, receiver = anyio.create_memory_object_stream[_Waiting](MAX_WAITING)
        async with anyio.create_task_group() as group, sender, receiver:
            group.start_soon(self._read, sender)
            while True:
                frame: _Waiting | None = None
                with anyio.move_on_after(IDLE_SECONDS), contextlib.suppress(anyio.EndOfStream):
                    frame = await receiver.receive()
                if frame is None:
                    break
                try:
                    await self._answer(frame)
                finally:
                    self._waiting.discard(frame)
                    frame.room.leave()
            group.cancel_scope.cancel()

    def _kept(self, text: str) -> _Waiting:
        """A frame that was read. One that waits behind another takes room at once, or is not kept: it would hold the
        room that others wait for as long as the answer before it takes."""
        raw = text.encode("utf-8", "surrogatepass")
        room = self._host.bodies.reservation(self._caller.name, len(raw))
        frame = _Waiting(raw if not self._waiting or room.take_now(len(raw)) else None, room)
        self._waiting.add(frame)
        return frame

    async def _read(self, sender: Any) -> None:
        with sender:
            while True:
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    self._gone.set()
                    return
                text = message.get("text")
                try:
                    if text is None:
                        await self._close(BINARY)
                        return
                    sender.send_nowait(self._kept(text))
                except anyio.WouldBlock:
                    await self._close(POLICY)
                    return

    async def _close(self, code: int) -> None:
        self._gone.set()
        await self._send({"type": "websocket.close", "code": code})

    async def _answer(self, frame: _Waiting) -> None:
        frames = _Frames(self._send)
        exchange = self._make_exchange(self._until_gone, frames.send)
        exchange.room = frame.room
        self._host.enter(exchange)
        try:
            with exchange.cancel_scope:
                await self._respond(exchange, frames, frame)
        except (Exception, BaseExceptionGroup) as error:
            cause = flatten(error)
            if not isinstance(cause, ClientGone):
                await exchange.respond_error(answer(cause, shape="responses", renames=exchange.renames))
        finally:
            self._host.leave(exchange)
            self._answered(exchange)

    async def _until_gone(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _respond(self, exchange: Exchange, frames: "_Frames", frame: _Waiting) -> None:
        self._host.require()
        if frame.raw is None:
            raise no_room()
        exchange.body_bytes = len(frame.raw)
        timeout = self._host.config.body_timeout
        await frame.room.enter(timeout)
        request = await decode_body(
            frame.raw,
            SocketRequest,
            self._unknown,
            limiter=self._host.decodes,
            reservation=frame.room,
            timeout=timeout,
        )
        frame.raw = None  # its memory is free while the request is answered
        await self._make(exchange, frames, request)

    async def _make(self, exchange: Exchange, frames: "_Frames", request: SocketRequest) -> None:
        if request.type != _CREATE:
            raise InvalidRequest(f"type must be {_CREATE}", param="type")
        if request.background:
            raise InvalidRequest("background: a WebSocket has no background responses", param="background")
        request, items = await self._joined(exchange, request)
        asked = msgspec.structs.replace(request, stream=True)
        work = create.create if request.generate is not False else _prewarm
        failure: Exception | BaseExceptionGroup[BaseException] | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.watch, group.cancel_scope)
            try:
                await work(self._host, self._jobs, exchange, asked)
            except (Exception, BaseExceptionGroup) as error:
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        await self._remember(exchange, frames.last, items)

    async def _joined(self, exchange: Exchange, request: SocketRequest) -> tuple[SocketRequest, Items]:
        """The request with the conversation of this connection, and all of its input.

        Raises:
            HttpError, RateLimited: see `read_held`.
        """
        items = as_items(request.input)
        if self._last is None or request.previous_response_id != self._last:
            return request, items
        held = self._host.threads.get(self._caller.owner, self._held(self._last))
        if held is None:
            return request, items
        items = [*await read_held(exchange, held, Items, self._host.held_limits), *items]
        return msgspec.structs.replace(request, input=items, previous_response_id=None), items

    async def _remember(self, exchange: Exchange, last: Mapping[str, Any] | None, items: Items) -> None:
        """Hold the items of a response that is not stored, up to the size of a body."""
        self._forget()
        if last is None or last.get("store") or last.get("status") == "failed":
            return
        encode = partial(msgspec.json.encode, after_compaction([*items, *last["output"]]))
        body = await offload(encode) if is_large(exchange) else encode()
        if len(body) <= self._host.config.max_body_bytes:
            self._last = last["id"]
            self._host.threads.put(self._caller.owner, self._held(last["id"]), body, None, IDLE_SECONDS)

    def _forget(self) -> None:
        if self._last is not None:
            self._host.threads.drop(self._caller.owner, self._held(self._last))
        self._last = None

    def _held(self, response_id: str) -> str:
        return f"{self._name}/{response_id}"


async def _prewarm(host: ServerState, jobs: Jobs, exchange: Exchange, request: ResponsesRequest) -> None:
    """Compute the prompt, and answer with a response that has no output."""
    plan = await make_plan(host, exchange, msgspec.structs.replace(request, store=False))
    chat = msgspec.structs.replace(plan.chat, max_completion_tokens=1, min_tokens=None)
    builder = ResponseBuilder(plan.frame)
    async with open_turn(host, exchange, chat, streaming=False) as turn:
        usage = (await turn.collect()).usage
    begun = builder.begin()
    usage = msgspec.structs.replace(usage, completion_tokens=0, reasoning_tokens=0)
    whole = msgspec.structs.replace(
        builder.response, status="completed", completed_at=host.now(), usage=usage_of(usage)
    )
    async with open_events(exchange, 0) as events:
        done = ResponseCompleted(sequence_number=len(begun), response=whole)
        await events.finish(encoded([*begun, done]), b"")


class _Frames:
    """Turns the messages of an HTTP answer into text frames: one for each event, or one for an error."""

    def __init__(self, send: Send) -> None:
        self.last: dict[str, Any] | None = None
        """The response of the last event that had one."""
        self._send = send
        self._status = 0
        self._streams = False
        self._rest = b""
        self._error: dict[str, Any] | None = None
        """An error event of the stream. It is sent where no failed response follows: clients stop at the first."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._streams = (b"content-type", EVENTS) in message["headers"]
            return
        self._rest += message.get("body", b"")
        if self._streams:
            *blocks, self._rest = self._rest.split(b"\n\n")
            for block in blocks:
                await self._event(block.partition(b"\ndata: ")[2])
        if message.get("more_body"):
            return
        if not self._streams:
            await self._fail(msgspec.json.decode(self._rest).get("error"))
        elif self._error is not None and self.last is None:
            self._status = 500
            await self._fail({name: self._error.get(name) for name in ("code", "message", "param")})

    async def _event(self, data: bytes) -> None:
        """Nothing where the block was a sign of life."""
        if data.startswith(_ERROR):
            self._error = msgspec.json.decode(data)
            return
        if data.startswith(_ENDS):
            self.last = msgspec.json.decode(data)["response"]
        if data:
            await self._send({"type": "websocket.send", "text": data.decode()})

    async def _fail(self, error: object) -> None:
        body = {"type": "error", "status": self._status, "error": error}
        await self._send({"type": "websocket.send", "text": msgspec.json.encode(body).decode()})
