"""Two clients that must not notice an attack, and what must be as before when it is over.

The first streams long greedy answers over and over; each must have the tokens of its solo run. The second asks a short
question every 100 ms and must always be answered the same. Afterwards the engine is idle, every block is free, and
tasks, descriptors and open requests are back where they were.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from serving import Served, events_of, eventually, running_server, server_config

from troupellm.actors.engine import Engine
from troupellm.protocol.config import ServerConfig

PERIOD_SECONDS = 0.1
SLACK = 2
"""Tasks and descriptors that may differ: connections close a little later than their clients think."""


class Attacked:
    """A server with canaries in it, and a client for the attack."""

    def __init__(self, engine: Engine, served: Served, headers: Mapping[str, str], length: int) -> None:
        self.engine = engine
        self.served = served
        self.headers = dict(headers)
        self.length = length
        self.client = served.client()
        self.client.headers.update(headers)
        self.answered = {"long": 0, "short": 0}
        self._over = False

    async def long_answers(self) -> None:
        """Stream until the attack is over; at least once."""
        request = {"model": self.engine.model_names[0], "prompt": "canary one", "max_tokens": self.length}
        request |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        solo = await self.engine.generate("canary one", max_tokens=self.length, temperature=0.0, ignore_eos=True)
        async with self.served.client() as client:
            while not (self._over and self.answered["long"]):
                response = await client.post("/v1/completions", json=request | {"stream": True}, headers=self.headers)
                assert response.status_code == 200, response.text
                choices = [event["choices"][0] for event in events_of(response.text)]
                assert tuple(token for choice in choices for token in choice["token_ids"]) == solo.token_ids
                self.answered["long"] += 1

    async def short_answers(self) -> None:
        request: dict[str, Any] = {"model": self.engine.model_names[0], "prompt": "two", "max_tokens": 4}
        request |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        first = None
        async with self.served.client() as client:
            while not (self._over and self.answered["short"]):
                response = await client.post("/v1/completions", json=request, headers=self.headers)
                assert response.status_code == 200, response.text
                tokens = response.json()["choices"][0]["token_ids"]
                first = first or tokens
                assert tokens == first
                self.answered["short"] += 1
                await anyio.sleep(PERIOD_SECONDS)

    async def finish(self) -> None:
        self._over = True
        await self.client.aclose()


@asynccontextmanager
async def under_attack(
    engine: Engine, config: ServerConfig | None = None, *, canary_tokens: int = 100
) -> AsyncIterator[Attacked]:
    """Serve an open engine with canaries; the block is the attack."""
    config = config or server_config()
    headers = {"authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
    async with running_server(engine, config) as served:
        async with served.client() as client:
            assert (await client.get("/readyz")).status_code == 200
        await eventually(lambda: _idle(engine))
        tasks, descriptors = len(anyio.get_running_tasks()), _descriptors()
        attacked = Attacked(engine, served, headers, canary_tokens)
        async with anyio.create_task_group() as group:
            group.start_soon(attacked.long_answers)
            group.start_soon(attacked.short_answers)
            try:
                yield attacked
            finally:
                await attacked.finish()
        assert min(attacked.answered.values()) > 0
        await eventually(lambda: _idle(engine), 2)
        await eventually(lambda: len(anyio.get_running_tasks()) <= tasks + SLACK, 2)
        await eventually(lambda: _descriptors() <= descriptors + SLACK, 2)
        assert not served.host.in_flight
        assert engine.state == "ready"


def _idle(engine: Engine) -> bool:
    snapshot = engine.snapshot()
    scheduler = snapshot.scheduler
    busy = scheduler.running + scheduler.waiting + scheduler.blocks_used + snapshot.open_requests
    return not busy and all(mailbox.depth == 0 for actor in snapshot.actors for mailbox in actor.mailboxes)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Resident memory of this process, which is server, engine and clients at once."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
