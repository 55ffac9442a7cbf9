"""Two clients that must not notice an attack, and what must be as before when it is over.

The first streams long greedy answers over and over; each must have the tokens of its solo run. The second asks a short
question every 100 ms and must always be answered the same. Afterwards the engine is idle, every block is free, and
tasks, descriptors and open requests are back where they were.

How long short answers took and how late the event loop was is recorded and printed; the bounds on them only tell a
server that stands still from one on a busy machine.
"""

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import psutil
from processes import ServerProcess
from serving import Served, events_of, eventually, guarded_app, running_server, server_config

from troupellm.actors.engine import Engine
from troupellm.protocol.config import ServerConfig

PLAIN = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PERIOD_SECONDS = 0.1
LATENCY_LIMIT_SECONDS = 30.0
"""For the slowest short answer."""
LAG_LIMIT_SECONDS = 5.0
"""For the latest call of a timer on the event loop that server, engine and clients share."""
TICK_SECONDS = 0.02
SLACK = 2
"""Tasks and descriptors that may differ: connections close a little later than their clients think."""


class Canaries:
    """The two clients, and what they felt. Works on any server that `make_client` reaches."""

    def __init__(self, make_client: Callable[[], httpx.AsyncClient], model: str, length: int) -> None:
        self._make_client = make_client
        self._long = {"model": model, "prompt": "canary one", "max_tokens": length} | PLAIN
        self._short = {"model": model, "prompt": "two", "max_tokens": 4} | PLAIN
        self.answered = {"long": 0, "short": 0}
        self.latencies: list[float] = []
        """Seconds of every short answer."""
        self.lags: list[float] = []
        """Seconds by which the event loop was late."""
        self._over = False

    @asynccontextmanager
    async def singing(self) -> AsyncIterator[None]:
        """They sing alone once, then until the block ends; at least once each while it runs."""
        async with self._make_client() as client:
            solo = [await _tokens(client, request) for request in (self._long, self._short)]
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch_the_loop)
            async with anyio.create_task_group() as group:
                group.start_soon(self._long_answers, solo[0])
                group.start_soon(self._short_answers, solo[1])
                try:
                    yield
                finally:
                    self._over = True
            watching.cancel_scope.cancel()
        print(self.report())
        assert max(self.latencies) < LATENCY_LIMIT_SECONDS, self.report()
        assert max(self.lags, default=0.0) < LAG_LIMIT_SECONDS, self.report()
        assert min(self.answered.values()) > 0

    async def _long_answers(self, solo: list[int]) -> None:
        async with self._make_client() as client:
            while not (self._over and self.answered["long"]):
                response = await client.post("/v1/completions", json=self._long | {"stream": True})
                assert response.status_code == 200, response.text
                choices = [event["choices"][0] for event in events_of(response.text)]
                assert [token for choice in choices for token in choice["token_ids"]] == solo
                self.answered["long"] += 1

    async def _short_answers(self, solo: list[int]) -> None:
        async with self._make_client() as client:
            while not (self._over and self.answered["short"]):
                began = time.perf_counter()
                assert await _tokens(client, self._short) == solo
                self.latencies.append(time.perf_counter() - began)
                self.answered["short"] += 1
                await anyio.sleep(PERIOD_SECONDS)

    async def _watch_the_loop(self) -> None:
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await anyio.sleep(TICK_SECONDS)
            self.lags.append(max(0.0, time.perf_counter() - due))

    def report(self) -> str:
        """What the canaries felt."""
        return (
            f"canaries: {self.answered['long']} long answers, {self.answered['short']} short ones in p50 "
            f"{_milliseconds(self.latencies, 0.5)}, p99 {_milliseconds(self.latencies, 0.99)} ms; event loop late by "
            f"p99 {_milliseconds(self.lags, 0.99)}, worst {_milliseconds(self.lags, 1.0)} ms"
        )


class Attacked(Canaries):
    """A server in this process with canaries in it, and a client for the attack."""

    def __init__(self, engine: Engine, served: Served, headers: Mapping[str, str], length: int) -> None:
        super().__init__(self.new_client, engine.model_names[0], length)
        self.engine = engine
        self.served = served
        self.headers = dict(headers)
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        client = self.served.client()
        client.headers.update(self.headers)
        return client


@asynccontextmanager
async def under_attack(
    engine: Engine, config: ServerConfig | None = None, *, canary_tokens: int = 100, guarded: bool = False
) -> AsyncIterator[Attacked]:
    """Serve an open engine with canaries; the block is the attack."""
    config = config or server_config()
    headers = {"authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
    app = guarded_app(engine, config) if guarded else None
    async with running_server(engine, config, app=app) as served:
        attacked = Attacked(engine, served, headers, canary_tokens)
        async with attacked.new_client() as client:
            assert (await client.get("/readyz")).status_code == 200
        await eventually(lambda: _idle(engine))
        tasks, descriptors = len(anyio.get_running_tasks()), _descriptors()
        async with attacked.client, attacked.singing():
            yield attacked
        await eventually(lambda: _idle(engine), 2)
        await eventually(lambda: len(anyio.get_running_tasks()) <= tasks + SLACK, 2)
        await eventually(lambda: _descriptors() <= descriptors + SLACK, 2)
        await eventually(lambda: not served.host.in_flight, 2)
        assert engine.state == "ready"


@asynccontextmanager
async def beside_canaries(server: ServerProcess, *, canary_tokens: int = 100) -> AsyncIterator[Canaries]:
    """The same around a server process of the tiny model: the block is the attack, afterwards it is as before."""
    canaries = Canaries(server.client, "tiny", canary_tokens)
    async with server.client() as client:
        assert (await client.get("/readyz")).status_code == 200
    process = psutil.Process(server.pid)
    await server.until_idle()
    descriptors, threads = process.num_fds(), process.num_threads()
    async with canaries.singing():
        yield canaries
    await server.until_idle(2)
    with anyio.fail_after(2):
        while process.num_fds() > descriptors + SLACK:  # noqa: ASYNC110 - another process's state
            await anyio.sleep(0.02)
    assert process.num_threads() <= threads + SLACK


async def _tokens(client: httpx.AsyncClient, request: Mapping[str, Any]) -> list[int]:
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def _idle(engine: Engine) -> bool:
    snapshot = engine.snapshot()
    scheduler = snapshot.scheduler
    busy = scheduler.running + scheduler.waiting + scheduler.blocks_used + snapshot.open_requests
    return not busy and all(mailbox.depth == 0 for actor in snapshot.actors for mailbox in actor.mailboxes)


def _milliseconds(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds) or [0.0]
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Resident memory of this process, which is server, engine and clients at once."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
