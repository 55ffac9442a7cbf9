"""Two clients that must not notice an attack, and what must be as before when it is over.

The first streams long greedy answers over and over, with log-probabilities; each must have the tokens of its solo run,
and the log-probabilities within 1e-4. The second asks a short question every 100 ms and must always be answered the
same. Within a second after the attack the engine is idle, every block is free, and tasks, descriptors, threads and open
requests are back where they were.

Two kinds of bounds are looser than in the table of faults, which means them for a server on cores of its own:

* How late the event loop is (there 20 ms, at worst 100) and how long short answers take (there three times the solo
  run). Attack, canaries, server and model share an event loop and one or two cores here; an attack that builds a body
  of megabytes holds the loop up by itself; and where a worker is killed, everybody waits for another one. Both are
  recorded and printed beside the solo run. The assertions find a server that stands still; benchmarks measure the rest.
* How much memory grows (there 32 MiB, after three rounds): an attack is one block here. It is printed, and `rounds`
  holds the bound for attacks that are repeated.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import httpx
import psutil
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.config.engine import ServerConfig
from troupellm.tests.support.environment.own_time import own_time, waited_for_a_core
from troupellm.tests.support.servers.processes import ServerProcess
from troupellm.tests.support.servers.serving import (
    Served,
    events_of,
    eventually,
    guarded_app,
    running_server,
    server_config,
)

PLAIN = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
TOLERANCE = 1e-4
"""Of log-probabilities."""
PERIOD_SECONDS = 0.1
LONG_TOKENS = 32
"""Of a long answer, if nothing else is said: some blocks, and some dozens of steps."""
SOLO_ANSWERS = 3
"""Short ones, of the canary alone."""
LATENCY_LIMIT_SECONDS = 30.0
"""For the slowest short answer."""
LAG_LIMIT_SECONDS = 5.0
"""For the latest call of a timer on the event loop that server, engine and clients share."""
TICK_SECONDS = 0.02
AFTER_SECONDS = 1.0
"""Until all is as before; see `own_time`."""
SLACK = 2
"""Tasks, threads and descriptors that may differ: connections close a little later than their clients think."""
TOKENIZER_THREADS = os.cpu_count() or 1
"""The tokenizer's library starts them with the first long text of a process, and they stay."""
WARM_UP_ROUNDS = 3
GROWTH_LIMIT_BYTES = 32 * 2**20

Answer = tuple[list[int], list[float]]
"""Tokens and log-probabilities."""


class Canaries:
    """The two clients, and what they felt. Works on any server that `make_client` reaches."""

    def __init__(
        self,
        make_client: Callable[[], httpx.AsyncClient],
        model: str,
        length: int,
        *,
        logprobs: bool = True,
        rest: float = 0.0,
        short_prompt: str = "two",
    ) -> None:
        """
        Args:
            logprobs: whether the model's worker computes log-probabilities.
            rest: seconds between two long answers.
            short_prompt: what the short answers are for.
        """
        self._make_client = make_client
        self._long = {"model": model, "prompt": "canary one", "max_tokens": length} | PLAIN
        if logprobs:
            self._long["logprobs"] = 1
        self._logprobs = logprobs
        self._short = {"model": model, "prompt": short_prompt, "max_tokens": 4} | PLAIN
        self.answered = {"long": 0, "short": 0}
        self.solo: list[float] = []
        """Seconds of every short answer without an attack."""
        self.latencies: list[float] = []
        """And under it."""
        self.lags: list[float] = []
        """Seconds by which the event loop was late, without what it waited for a core."""
        self._rest = rest
        self._over = anyio.Event()

    @asynccontextmanager
    async def singing(self) -> AsyncIterator[None]:
        """They sing alone first, then until the block ends, and a long answer is begun once more behind it."""
        async with self._make_client() as client:
            long = await _answer(client, self._long)
            assert len(long[1]) == len(long[0]) * self._logprobs
            short = await _answer(client, self._short)
            for _ in range(SOLO_ANSWERS):
                self.solo.append(await self._ask_short(client, short))
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch_the_loop)
            async with anyio.create_task_group() as group:
                group.start_soon(self._long_answers, long)
                group.start_soon(self._short_answers, short)
                try:
                    yield
                finally:
                    self._over.set()
            watching.cancel_scope.cancel()
        print(self.report())
        assert max(self.latencies) < LATENCY_LIMIT_SECONDS, self.report()
        assert max(self.lags, default=0.0) < LAG_LIMIT_SECONDS, self.report()
        assert min(self.answered.values()) > 0

    async def more_short_answers(self, count: int = 1) -> None:
        """Until the short canary has so many more answers. An attack that needs a pace takes it from here."""
        wanted = self.answered["short"] + count
        await eventually(lambda: self.answered["short"] >= wanted, LATENCY_LIMIT_SECONDS * count)

    async def _long_answers(self, solo: Answer) -> None:
        async with self._make_client() as client:
            over = False
            while not over:
                over = self._over.is_set()  # before the last one: it meets what the attack has left
                response = await client.post("/v1/completions", json=self._long | {"stream": True})
                assert response.status_code == 200, response.text
                _check(_joined([event["choices"][0] for event in events_of(response.text)]), solo)
                self.answered["long"] += 1
                with anyio.move_on_after(self._rest):
                    await self._over.wait()

    async def _short_answers(self, solo: Answer) -> None:
        async with self._make_client() as client:
            due = anyio.current_time()
            while not (self._over.is_set() and self.answered["short"]):
                self.latencies.append(await self._ask_short(client, solo))
                self.answered["short"] += 1
                due = max(due + PERIOD_SECONDS, anyio.current_time())
                await anyio.sleep_until(due)

    async def _ask_short(self, client: httpx.AsyncClient, solo: Answer) -> float:
        began = time.perf_counter()
        _check(await _answer(client, self._short), solo)
        return time.perf_counter() - began

    async def _watch_the_loop(self) -> None:
        while True:
            due, waited = time.perf_counter() + TICK_SECONDS, waited_for_a_core()
            await anyio.sleep(TICK_SECONDS)
            late = time.perf_counter() - due
            self.lags.append(max(0.0, late - (waited_for_a_core() - waited)))

    def report(self) -> str:
        """The canaries' latencies."""
        return (
            f"canaries: {self.answered['long']} long answers, {self.answered['short']} short ones in p50 "
            f"{_milliseconds(self.latencies, 0.5)}, p99 {_milliseconds(self.latencies, 0.99)} ms (alone "
            f"{_milliseconds(self.solo, 0.5)} and {_milliseconds(self.solo, 0.99)}); event loop late by "
            f"p99 {_milliseconds(self.lags, 0.99)}, worst {_milliseconds(self.lags, 1.0)} ms"
        )


class Attacked(Canaries):
    """A server in this process with canaries in it, and a client for the attack."""

    def __init__(self, engine: Engine, served: Served, headers: Mapping[str, str], length: int, **song: Any) -> None:
        super().__init__(self.new_client, engine.model_names[0], length, **song)
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
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    canary_tokens: int = LONG_TOKENS,
    guarded: bool = False,
    logprobs: bool = True,
    rest: float = 0.0,
    short_prompt: str = "two",
) -> AsyncIterator[Attacked]:
    """Serve an open engine with canaries; the block is the attack."""
    config = config or server_config()
    headers = {"authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
    app = guarded_app(engine, config) if guarded else None
    async with running_server(engine, config, app=app) as served:
        song = {"logprobs": logprobs, "rest": rest, "short_prompt": short_prompt}
        attacked = Attacked(engine, served, headers, canary_tokens, **song)
        async with attacked.new_client() as client:
            assert (await client.get("/readyz")).status_code == 200
        await eventually(lambda: _idle(engine))
        tasks, descriptors, resident = len(anyio.get_running_tasks()), _descriptors(), resident_bytes()
        async with attacked.client, attacked.singing():
            yield attacked
        began = own_time()
        while left := _left(engine, served, tasks, descriptors):
            assert own_time() - began < AFTER_SECONDS, f"after the attack: {left}"
            await anyio.sleep(0.005)
        print(f"memory grew by {(resident_bytes() - resident) / 2**20:.1f} MiB")
        assert engine.state == "ready"


under_many = partial(under_attack, canary_tokens=24, rest=0.3)
"""For attacks of many small requests: short songs, which leave them the processor in between."""


def _left(engine: Engine, served: Served, tasks: int, descriptors: int) -> dict[str, int]:
    """The parts of the state that are not yet as before."""
    scheduler = engine.snapshot().scheduler
    waiting = sum(mailbox.depth for actor in engine.snapshot().actors for mailbox in actor.mailboxes)
    found = {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "blocks in use": scheduler.blocks_used,
        "open requests": engine.snapshot().open_requests,
        "messages": waiting,
        "requests in flight": len(served.host.in_flight),
        "tasks": max(0, len(anyio.get_running_tasks()) - tasks - SLACK),
        "descriptors": max(0, _descriptors() - descriptors - SLACK),
    }
    return {name: number for name, number in found.items() if number}


@asynccontextmanager
async def beside_canaries(server: ServerProcess, *, canary_tokens: int = LONG_TOKENS) -> AsyncIterator[Canaries]:
    """The same around a server process of the tiny model: the block is the attack, afterwards it is as before."""
    canaries = Canaries(server.client, "tiny", canary_tokens)
    process = psutil.Process(server.pid)
    async with server.client() as client:
        assert (await client.get("/readyz")).status_code == 200
    await server.until_idle()
    descriptors, resident = descriptors_of(process), process.memory_info().rss
    threads = process.num_threads() + TOKENIZER_THREADS
    async with canaries.singing():
        yield canaries
    began = own_time(server.pid)
    async with server.client() as client:  # one for all questions: to make one takes a while
        while held := await server.held(client):
            assert own_time(server.pid) - began < AFTER_SECONDS, f"after the attack: {held}"
            await anyio.sleep(0.02)
    began = own_time(server.pid)
    while descriptors_of(process) > descriptors + SLACK or process.num_threads() > threads + SLACK:
        now = f"{descriptors_of(process)} descriptors and {process.num_threads()} threads"
        assert own_time(server.pid) - began < AFTER_SECONDS, f"{now}, before: {descriptors} and {threads}"
        await anyio.sleep(0.02)
    print(f"the server's memory grew by {(process.memory_info().rss - resident) / 2**20:.1f} MiB")


async def rounds(attack: Callable[[], Awaitable[None]], count: int = 3) -> None:
    """Repeat an attack: what the first three rounds make once stays, and the others may hardly add to it."""
    for _ in range(WARM_UP_ROUNDS):
        await attack()
    before = resident_bytes()
    for _ in range(count):
        await attack()
    growth = resident_bytes() - before
    print(f"{count} rounds after {WARM_UP_ROUNDS} let memory grow by {growth / 2**20:.1f} MiB")
    assert growth < GROWTH_LIMIT_BYTES


async def _answer(client: httpx.AsyncClient, request: Mapping[str, Any]) -> Answer:
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return _joined(response.json()["choices"])


def _joined(parts: Sequence[Mapping[str, Any]]) -> Answer:
    """Of the parts of one choice."""
    tokens = [token for part in parts for token in part["token_ids"]]
    logprobs = [part["logprobs"]["token_logprobs"] for part in parts if part.get("logprobs") is not None]
    return tokens, [value for values in logprobs for value in values]


def _check(answer: Answer, solo: Answer) -> None:
    assert answer[0] == solo[0]
    assert answer[1] == pytest.approx(solo[1], abs=TOLERANCE)


def _idle(engine: Engine) -> bool:
    snapshot = engine.snapshot()
    scheduler = snapshot.scheduler
    busy = scheduler.running + scheduler.waiting + scheduler.blocks_used + snapshot.open_requests
    return not busy and all(mailbox.depth == 0 for actor in snapshot.actors for mailbox in actor.mailboxes)


def _milliseconds(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds) or [0.0]
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def descriptors_of(process: psutil.Process) -> int:
    """Open descriptors of a process, less the two pipes to each of its template processes.

    These stay for the next chats, up to one for each thread that renders:
    tests/models/chat_template/test_template_process.py.
    """
    templates = 0
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            templates += any(part.endswith("template_child.py") for part in child.cmdline())
    return process.num_fds() - 2 * templates


def _descriptors() -> int:
    return descriptors_of(psutil.Process())


def resident_bytes() -> int:
    """Resident memory of this process, which is server, engine and clients at once."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
