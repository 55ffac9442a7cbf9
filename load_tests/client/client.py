"""One streamed request over a socket of its own, timed where its bytes arrive."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from troupellm.load_tests.client.http1 import ProtocolError, ResponseParser, request_bytes
from troupellm.load_tests.client.records import RequestRecord, SampleRequest, describe_error
from troupellm.load_tests.client.sse import SseReader

MAX_ERROR_BODY = 65_536


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what they have in common."""

    host: str
    port: int
    path: str
    tls: bool
    chat: bool
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    """Fields of every request body."""
    timeout: float
    """Seconds for one whole exchange."""

    @classmethod
    def make(
        cls,
        url: SplitResult,
        path: str,
        *,
        api_key: str | None,
        more_headers: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> "Target":
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        headers |= {name.lower(): value for name, value in (more_headers or {}).items()}
        tls = url.scheme == "https"
        port = url.port or (443 if tls else 80)
        return cls(host=url.hostname or "", port=port, path=path, tls=tls, headers=headers, **settings)

    @classmethod
    def completions(
        cls, server: str, *, model: str, body: Mapping[str, Any], timeout: float, api_key: str | None = None
    ) -> "Target":
        """The completions of a server, by the address of its root."""
        path = "/v1/completions"
        return cls.make(urlsplit(server), path, api_key=api_key, chat=False, model=model, body=body, timeout=timeout)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def request_body(self, sample: SampleRequest) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sample.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            fields["prompt"] = sample.prompt
        return msgspec.json.encode({**fields, **self.body})


class _Exchange(asyncio.Protocol):
    """Sends a request when connected; feeds what comes back to the record."""

    def __init__(self, record: RequestRecord, payload: bytes) -> None:
        self._record = record
        self._payload = payload
        self._parser = ResponseParser()
        self._events = SseReader()
        self._error_body = bytearray()
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolved with the transport's error, or an empty text."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._parser.feed(data)
        except ProtocolError as error:
            self._finish(str(error))
            return
        self._record.status = self._parser.status
        if self._parser.status == 200:
            for event in self._events.feed(body):
                self._record.on_event(event, now)
        elif len(self._error_body) < MAX_ERROR_BODY:
            self._error_body += body
        if self._parser.complete:
            self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._parser.eof()
        except ProtocolError as error:
            self._finish(str(exc or error))
        else:
            self._finish("")

    def _finish(self, error: str) -> None:
        if self.over.done():
            return
        self._record.ended = time.perf_counter()
        if self._error_body:
            self._record.stream_error = _http_error(self._record.status, bytes(self._error_body))
        self.over.set_result(error)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def exchange(target: Target, sample: SampleRequest, record: RequestRecord) -> None:
    """Send one request and read its stream into `record`, which is judged at the end. Raises nothing of its own.

    A cancelled exchange leaves a failed record behind.
    """
    body = target.request_body(sample)
    payload = request_bytes("POST", target.authority, target.path, target.headers, body)
    protocol = _Exchange(record, payload)
    context = _trusting() if target.tls else None
    error = "cut off: the run's time limit"
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout):
            await asyncio.get_running_loop().create_connection(lambda: protocol, target.host, target.port, ssl=context)
            error = await protocol.over
    except TimeoutError:
        error = f"no complete answer in {target.timeout:g} s"
    except OSError as problem:
        error = f"cannot connect: {problem.strerror or problem}"
    finally:
        record.ended = record.ended or time.perf_counter()
        protocol.close()
        record.judge(error)


@cache
def _trusting() -> ssl.SSLContext:
    """Made once: it reads all certificates that the system trusts, which holds up every other request."""
    return ssl.create_default_context()


def _http_error(status: int, body: bytes) -> str:
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = body.decode("utf-8", errors="replace")
    if isinstance(content, dict):
        content = content.get("error", content)
    return f"HTTP {status}: {describe_error(content)}"
