"""Conversations that the server holds, so that the next request sends its new turn only: threads of the messages API,
and the last response of each WebSocket.

A thread is a cache in the memory of one process. A client whose thread is gone is told so, and sends the whole
conversation again. A response can be continued once: its successor takes its place.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec

from troupellm.actors.metrics.families import counter, families, gauge, text_of
from troupellm.protocol.api.anthropic import ContentBlock, InputMessage, PromptFields
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import declared_bytes, is_large
from troupellm.server.base.errors import HttpError, too_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload

MAX_THREADS = 4_096
MAX_BYTES = 64 * 2**20
"""Of all threads of a process."""
SECONDS = 300.0
"""From a thread's last use to its end."""

RequestT = TypeVar("RequestT", bound=PromptFields)
HeldT = TypeVar("HeldT")

_FAMILIES = (
    gauge("message_threads", "Conversations that are held.", len),
    gauge("message_threads_bytes", "Bytes of these.", "size"),
    counter("message_threads_missed", "Requests that named no thread that is held.", "num_missed"),
    counter("message_threads_evicted", "Threads that made room for others.", "num_evicted"),
)


class Conversation(msgspec.Struct, omit_defaults=True):
    """The content of a thread of the messages API, which is held as JSON."""

    messages: list[InputMessage]
    system: Any = None
    tools: Any = None


class _Held(msgspec.Struct, frozen=True):
    body: bytes
    seconds: float
    expires: float


class Threads:
    """Conversations by the id of the response that they end with. Each belongs to an owner."""

    def __init__(
        self, *, threads: int = MAX_THREADS, size: int = MAX_BYTES, now: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            threads, size: how many threads and bytes are held at most.
            now: seconds of a clock that never goes back.
        """
        self._threads = threads
        self._size = size
        self._now = now
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        """Least recently used first."""
        self._bytes: Counter[str] = Counter()
        """By owner."""
        self._numbers: Counter[str] = Counter()
        """By owner."""
        self.num_missed = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def size(self) -> int:
        """Bytes of all threads."""
        return self._bytes.total()

    def get(self, owner: str, name: str) -> bytes | None:
        """A conversation, whose time begins again; None where there is none, or another owner's."""
        self._expire()
        held = self._held.get((owner, name))
        if held is None:
            self.num_missed += 1
            return None
        self._held[owner, name] = _Held(held.body, held.seconds, self._now() + held.seconds)
        self._held.move_to_end((owner, name))
        return held.body

    def put(self, owner: str, name: str, body: bytes, previous: str | None, seconds: float = SECONDS) -> None:
        """Hold a conversation in the place of the one that it continues.

        Args:
            seconds: from its last use to its end.
        """
        self._expire()
        if previous is not None:
            self.drop(owner, previous)
        self.drop(owner, name)
        if len(body) > self._size:
            return
        self._held[owner, name] = _Held(body, seconds, self._now() + seconds)
        self._bytes[owner] += len(body)
        self._numbers[owner] += 1
        while len(self._held) > self._threads:
            self._evict(self._numbers)
        while self.size > self._size:
            self._evict(self._bytes)

    def drop(self, owner: str, name: str) -> None:
        """Hold a conversation no longer. Idempotent."""
        held = self._held.pop((owner, name), None)
        if held is not None:
            for counter, amount in ((self._bytes, len(held.body)), (self._numbers, 1)):
                counter[owner] -= amount
                if not counter[owner]:
                    del counter[owner]

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return text_of(families(_FAMILIES, self))

    def _expire(self) -> None:
        now = self._now()
        for key in [key for key, held in self._held.items() if held.expires <= now]:
            self.drop(*key)

    def _evict(self, counter: Counter[str]) -> None:
        """The least recently used thread of the owner that has most."""
        most, _ = counter.most_common(1)[0]
        self.drop(*next(key for key in self._held if key[0] == most))
        self.num_evicted += 1


class Limits(msgspec.Struct, frozen=True):
    """Bounds of what a request continues."""

    most_bytes: int
    """Of the request and the conversation that it continues, together."""
    timeout: float
    """Seconds in which there must be room for both; 0 waits for ever."""
    decodes: anyio.CapacityLimiter
    """How many large bodies are decoded at once."""


async def read_held(exchange: Exchange, body: bytes, kind: type[HeldT], limits: Limits) -> HeldT:
    """A conversation that is held, which counts from now on as if the client had sent it.

    Raises:
        HttpError: 413, it is too large together with the request; 503, there is no room for both.
        RateLimited: there is no room for both among the bodies of the key.
    """
    exchange.body_bytes = declared_bytes(exchange) or 0
    if exchange.body_bytes + len(body) > limits.most_bytes:
        raise too_large(limits.most_bytes, continues=True)
    await exchange.add_bytes(len(body), limits.timeout)
    read = partial(msgspec.json.decode, body, type=kind)
    return await offload(read, limiter=limits.decodes) if is_large(exchange) else read()


async def joined(threads: Threads, exchange: Exchange, request: RequestT, limits: Limits) -> tuple[RequestT, int]:
    """The request with the conversation that it continues, and how many messages of it come from there.

    Raises:
        InvalidRequest: it continues, and does not say what.
        HttpError: 404, there is no such thread; else see `read_held`.
    """
    thread = request.thread
    if thread is None or thread.type == "create":
        return request, 0
    if thread.previous_message_id is None:
        param = "thread.previous_message_id"
        raise InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    body = threads.get(exchange.owner, thread.previous_message_id)
    if body is None:
        raise _not_found()
    before = await read_held(exchange, body, Conversation, limits)
    whole = msgspec.structs.replace(
        request,
        messages=[*before.messages, *request.messages],
        system=before.system if request.system is None else request.system,
        tools=before.tools if request.tools is None else request.tools,
    )
    return whole, len(before.messages)


async def hold(
    threads: Threads, exchange: Exchange, request: PromptFields, name: str, content: list[ContentBlock]
) -> None:
    """Hold the conversation with its answer, where the request asks for that.

    Args:
        request: the whole conversation, see `joined`.
        name: id of the answer.
    """
    thread = request.thread
    if thread is None:
        return
    answer = InputMessage(role="assistant", content=msgspec.to_builtins(content))
    whole = Conversation([*request.messages, answer], request.system, request.tools)
    encode = partial(msgspec.json.encode, whole)
    body = await offload(encode) if is_large(exchange) else encode()
    previous = thread.previous_message_id if thread.type == "continue" else None
    threads.put(exchange.owner, name, body, previous)


@contextmanager
def counted_from(first: int) -> Iterator[None]:
    """Errors count a request's own messages, without the first ones, which a thread has brought."""
    try:
        yield
    except InvalidRequest as error:
        position, end, rest = (error.param or "").removeprefix("messages[").partition("]")
        if first and end and position.isdecimal() and int(position) >= first:
            ours = f"messages[{int(position) - first}]"
            error.message = error.message.replace(f"messages[{position}]", ours)
            error.args, error.param = (error.message,), ours + rest
        raise


def _not_found() -> HttpError:
    message = 'no thread ends with this message here: send the whole conversation with thread: {"type": "create"}'
    error = HttpError(404, message, code="thread_not_found")
    error.param = "thread.previous_message_id"
    return error
