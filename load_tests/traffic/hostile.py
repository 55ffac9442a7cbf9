"""Requests of the keys of `bench hostile`: a watched stream, floods, and short requests of another key."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.http1 import request_bytes
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.traffic.own_server import OwnServer

KEYS = {"steady": "sk-steady", "loud": "sk-loud", "polite": "sk-polite"}
REQUEST_SECONDS = 300.0
STREAM_TOKENS = 1_500
WARM_CHUNKS = 50
"""Of the stream, before anything is measured."""
PAUSE = 0.02
STATUS_LINE = len("HTTP/1.1 200")


def key_file() -> str:
    """The content of the server's key file."""
    return "".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items())


class Traffic:
    def __init__(self, server: OwnServer) -> None:
        self._url = urlsplit(server.url)
        self._model = server.model
        self.chunks: list[float] = []
        """Arrivals of the watched stream."""

    async def ask(self, key: str, prompt: Any, tokens: int, *, chat: bool = False, **fields: Any) -> RequestRecord:
        """One streamed request, greedy. A failed one says so in its record."""
        record = RequestRecord(index=0, wanted_tokens=tokens, ignore_eos=True)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        target = Target.make(
            self._url,
            path,
            api_key=KEYS[key],
            chat=chat,
            model=self._model,
            body={"temperature": 0.0, **fields},
            timeout=REQUEST_SECONDS,
        )
        await exchange(target, SampleRequest(prompt=prompt, output_len=tokens), record)
        return record

    def large_request(self, key: str, num_bytes: int) -> bytes:
        """A completions request with a body of that size."""
        body = msgspec.json.encode({"model": self._model, "prompt": "", "max_tokens": 1})
        body = body.replace(b'""', b'"' + b"x" * (num_bytes - len(body)) + b'"')
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[key]}"}
        return request_bytes("POST", self._url.netloc, "/v1/completions", headers, body)

    async def send_then_read(self, request: bytes) -> int:
        """Send all of a request before reading, as most client libraries do.

        Returns:
            The status; 0 if the answer was lost.
        """
        loop = asyncio.get_running_loop()
        seen = b""
        with socket.socket() as client, suppress(ConnectionError):
            client.setblocking(False)
            await loop.sock_connect(client, (self._url.hostname, self._url.port))
            with suppress(ConnectionError):
                await loop.sock_sendall(client, request)
            while len(seen) < STATUS_LINE and (data := await loop.sock_recv(client, STATUS_LINE)):
                seen += data
        return int(seen[-3:]) if len(seen) >= STATUS_LINE else 0

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """One greedy stream after another, from when it is warm.

        Raises:
            RuntimeError: a stream failed.
        """
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._stream())
            async with asyncio.timeout(REQUEST_SECONDS):
                while len(self.chunks) < WARM_CHUNKS:
                    await asyncio.sleep(PAUSE)
            yield
            running.cancel()

    async def _stream(self) -> None:
        body = {"temperature": 0.0, "ignore_eos": True}
        target = Target.completions(
            self._url.geturl(), model=self._model, body=body, timeout=REQUEST_SECONDS, api_key=KEYS["steady"]
        )
        while True:
            record = RequestRecord(index=0, wanted_tokens=STREAM_TOKENS, ignore_eos=True, chunk_times=self.chunks)
            await exchange(target, SampleRequest(prompt="Once upon a time", output_len=STREAM_TOKENS), record)
            if record.error:
                raise RuntimeError(f"the watched stream failed: {record.error}")

    def longest_gap(self, begin: float) -> float:
        """Seconds between two chunks since `begin`."""
        chunks = [*self.chunks, time.perf_counter()]
        return max(after - before for before, after in pairwise(chunks) if after > begin)


def schema(num_bytes: int, source: random.Random) -> dict[str, Any]:
    """A schema of nested objects with names that no other one has."""
    properties: dict[str, Any] = {}
    while num_bytes > 0:
        name = f"{source.getrandbits(48):012x}"
        properties[name] = {
            "type": "object",
            "properties": {
                f"{name}_kind": {"type": "string", "enum": [f"{name}_{number}" for number in range(4)]},
                f"{name}_size": {"type": "integer"},
                f"{name}_list": {"type": "array", "items": {"type": "number"}},
            },
            "required": [f"{name}_size"],
        }
        num_bytes -= 300
    return {"type": "object", "properties": properties, "required": list(properties)}


def response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}


def percentile_95(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
