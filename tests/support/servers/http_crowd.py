"""Streams over HTTP that must have the tokens of their solo runs in spite of all faults of the server."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx

from troupellm.actors.engine.engine import Engine
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.processes import START_SECONDS, ServerProcess
from troupellm.tests.support.servers.serving import eventually

STREAMS = 32
KINDS = 8
"""Different prompts; every other one is drawn, with a seed."""
LENGTH = 300
"""Tokens of each: long enough for a fault to meet them, few enough for the blocks of a small server."""

Solo = list[tuple[int, ...]]
"""The tokens of each kind."""


def prompt(kind: int) -> list[int]:
    return [40 + kind, 41, 42 + kind % 7]


def sampling(kind: int) -> dict[str, Any]:
    drawn = {"temperature": 1.0, "seed": kind} if kind % 2 else {"temperature": 0.0}
    return drawn | {"max_tokens": LENGTH, "ignore_eos": True}


def solo_runs(checkpoint: Path) -> Solo:
    """On a worker thread of this process, one after the other."""

    async def run() -> Solo:
        async with Engine(checkpoint, **SETTINGS) as engine:
            return [(await engine.generate(prompt(kind), **sampling(kind))).token_ids for kind in range(KINDS)]

    return anyio.run(run)


def request(kind: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt(kind), "return_token_ids": True} | sampling(kind)


class HttpCrowd:
    """`num_tokens`: what each stream has got so far."""

    def __init__(self, server: ServerProcess, solo: Solo, size: int = STREAMS) -> None:
        self._server, self._solo, self._size = server, solo, size
        self.num_tokens = [0] * size

    async def run(self, attack: Callable[[], Awaitable[None]]) -> None:
        """The attack begins when every stream has; returns when all have ended."""
        async with self._server.client() as client, anyio.create_task_group() as group:
            for number in range(self._size):
                group.start_soon(self._read, client, number)
            await eventually(lambda: min(self.num_tokens) > 0, START_SECONDS)
            await attack()

    async def _read(self, client: httpx.AsyncClient, number: int) -> None:
        kind, tokens = number % KINDS, []
        async with client.stream("POST", "/v1/completions", json=request(kind) | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens += event["choices"][0]["token_ids"]
                    self.num_tokens[number] = len(tokens)
        assert tuple(tokens) == self._solo[kind]
