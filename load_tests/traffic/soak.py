"""The soak's clients: every way to use a server, and to misuse it. Each call ends in exactly one counted outcome."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from troupellm.load_tests.traffic.own_server import OwnServer

REQUEST_SECONDS = 120.0
STALL_SECONDS = 3.0
_WORDS = ("fox", "river", "story", "morning", "seven", "table", "lantern", "quiet", "what", "is", "the", "JSON")
_BAD: tuple[tuple[int, dict[str, Any] | bytes], ...] = (
    (400, b"{"),
    (400, {"n": 0}),
    (400, {"temperature": 9}),
    (400, {"max_tokens": 10**9}),
    (400, {"logit_bias": {"99999999": 1}}),
    (404, {"model": "no-such-model"}),
)
UNEXPECTED = "unexpected: "


class Traffic:
    """`ends` counts outcomes by class; those that start with `unexpected` fail the soak."""

    def __init__(self, server: OwnServer, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=REQUEST_SECONDS)
        self.ends: Counter[str] = Counter()
        self.over = False

    async def run(self) -> None:
        """One client, until the traffic is over."""
        kinds: list[tuple[Callable[[], Awaitable[str]], int]] = [
            (self._whole, 20),
            (self._stream, 30),
            (self._chat, 15),
            (self._many, 8),
            (self._leave, 12),
            (self._leave_at_once, 8),
            (self._bad, 10),
            (self._stall, 3),
        ]
        calls, weights = zip(*kinds, strict=True)
        while not self.over:
            try:
                self.ends[await self._random.choices(calls, weights)[0]()] += 1
            except (httpx.HTTPError, OSError) as error:
                self.ends[f"{UNEXPECTED}transport error {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self._client.aclose()

    def _request(self, **fields: Any) -> dict[str, Any]:
        choose = self._random
        words = [choose.choice(_WORDS) for _ in range(choose.choice((3, 10, 40, 150)))]
        prefix = f"Prompt {choose.randrange(20)}. " * choose.choice((1, 10))  # some are met again in the prefix cache
        request = {
            "model": self._server.model,
            "prompt": prefix + " ".join(words),
            "max_tokens": choose.choice((1, 8, 30, 120)),
            "temperature": choose.choice((0.0, 0.8)),
        }
        return request | fields

    async def _whole(self) -> str:
        answer = await self._client.post("/v1/completions", json=self._request())
        return _outcome("whole", answer)

    async def _chat(self) -> str:
        request = self._request()
        content = request.pop("prompt")
        answer = await self._client.post(
            "/v1/chat/completions", json=request | {"messages": [{"role": "user", "content": content}]}
        )
        return _outcome("chat", answer)

    async def _many(self) -> str:
        options = {"n": 3, "temperature": 1.0, "seed": 1, "logprobs": 5, "presence_penalty": 0.5, "stop": ["zzz"]}
        return _outcome("several", await self._client.post("/v1/completions", json=self._request(**options)))

    async def _stream(self) -> str:
        request = self._request(stream=True)
        async with self._client.stream("POST", "/v1/completions", json=request) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return _outcome("stream", answer)
            finished, last = False, ""
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"{UNEXPECTED}stream ended by error {event['error']['code']}"
                    finished = finished or event["choices"][0]["finish_reason"] is not None
                last = line or last
            return "stream: ok" if finished and last == "data: [DONE]" else f"{UNEXPECTED}stream silently short"

    async def _leave(self) -> str:
        request = self._request(stream=True, max_tokens=500)
        async with self._client.stream("POST", "/v1/completions", json=request) as answer:
            pieces = self._random.choice((0, 1, 5))
            async for _ in answer.aiter_raw():
                if pieces == 0:
                    break
                pieces -= 1
        return "left while streaming"

    async def _leave_at_once(self) -> str:
        _, writer = await self._raw(self._request(stream=self._random.random() < 0.5))
        writer.close()
        await writer.wait_closed()
        return "left at once"

    async def _stall(self) -> str:
        """Reads nothing for a while, with a small buffer, then leaves."""
        _, writer = await self._raw(self._request(stream=True, max_tokens=1000, logprobs=5), receive_buffer=4096)
        await asyncio.sleep(STALL_SECONDS)
        writer.transport.abort()
        return "stalled, then left"

    async def _bad(self) -> str:
        status, fields = self._random.choice(_BAD)
        content = fields if isinstance(fields, bytes) else json.dumps(self._request(**fields)).encode()
        answer = await self._client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        return "refused as it must be" if answer.status_code == status else _outcome("bad request", answer)

    async def _raw(
        self, request: dict[str, Any], receive_buffer: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own that has sent the request."""
        address = urlsplit(self._server.url)
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plain, (address.hostname, address.port))
        except BaseException:
            plain.close()
            raise
        # A small limit keeps asyncio from reading on behalf of a client that stalls.
        reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
        body = json.dumps(request).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


def _outcome(kind: str, answer: httpx.Response) -> str:
    if answer.status_code == 200:
        return f"{kind}: ok"
    try:
        code = answer.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = "no error object"
    if answer.status_code == 429:
        return f"{kind}: refused for now ({code})"
    return f"{UNEXPECTED}{kind} {answer.status_code} {code}"
