"""Fronts as children of the test's own process, over an engine in it."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import psutil
import pytest
from anyio.abc import TaskStatus

from troupellm.actors.runtime.supervise import Child, Supervisor
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.api_processes import process as members, processes as fleets
from troupellm.server.api_processes.processes import ApiProcesses, ApiProcessesFailed
from troupellm.server.http.listener import bind
from troupellm.server.http.server import CLOSE_SECONDS
from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.engines.inside import members_of, worker_host_of
from troupellm.tests.support.environment.hand_clock import HandClock
from troupellm.tests.support.servers.serving import server_config
from troupellm.tests.support.workers.meddler import MARKER, WorkerHosts

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running_fleet(config: ServerConfig) -> AsyncIterator[tuple[ApiProcesses, str]]:
    listener, url = bind(config)
    fleet = ApiProcesses(config, listener)
    async with anyio.create_task_group() as group:
        await group.start(fleet.run)
        try:
            yield fleet, url
        finally:
            with anyio.CancelScope(shield=True):
                await fleet.stop(CLOSE_SECONDS)


def pids_of(fleet: ApiProcesses) -> set[int]:
    return {api_process.pid for api_process in members_of(fleet).values() if api_process.pid is not None}


async def until(holds: Callable[[], object], timeout: float = 20.0) -> None:
    with anyio.fail_after(timeout):
        while not holds():  # noqa: ASYNC110 - other processes
            await anyio.sleep(0.01)


@pytest.mark.slow
async def test_a_front_that_hangs_is_replaced(tiny_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "DEAF_REPORTS", 20)
    config = server_config(api_server_count=2)
    async with tiny_engine() as engine, running_fleet(config) as (fleet, url):
        await fleet.open(engine)
        hung = min(pids_of(fleet))
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: hung not in pids_of(fleet))
        assert not psutil.pid_exists(hung)
        await until(lambda: all(api_process.ready for api_process in members_of(fleet).values()))
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client:
            request = {"model": "tiny", "prompt": "x", "max_tokens": 2, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=request)
        assert answer.json()["usage"]["completion_tokens"] == 2
        await until(lambda: not fleet.in_flight)
        children = pids_of(fleet)
    assert not any(psutil.pid_exists(pid) for pid in children)


@pytest.mark.slow
async def test_fronts_outlive_their_engine_for_as_long_as_they_must(tiny_engine: Any) -> None:
    async with running_fleet(server_config(api_server_count=2)) as (fleet, url):
        async with tiny_engine() as engine:
            await fleet.open(engine)
        children = pids_of(fleet)
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client:
            for path in ("/readyz", "/livez"):
                with anyio.fail_after(10):
                    while (await client.get(path)).status_code == 200:  # noqa: ASYNC110 - told within a second
                        await anyio.sleep(0.01)
            assert (await client.get("/metrics")).status_code == 503
            assert (await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 503
        victim = min(children)
        os.kill(victim, signal.SIGKILL)  # another one starts and has nothing to serve either
        await until(
            lambda: (
                victim not in pids_of(fleet) and all(api_process.linked for api_process in members_of(fleet).values())
            )
        )
        assert len(pids_of(fleet) & children) == 1


@pytest.mark.slow
async def test_fronts_tell_that_the_worker_restarts(tiny_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = WorkerHosts()
    config = server_config(api_server_count=2)
    async with tiny_engine(worker=hosts) as engine, running_fleet(config) as (fleet, url):
        await fleet.open(engine)
        gate, left = anyio.Event(), [True]
        worker_host = worker_host_of(engine)
        restart = worker_host.restart

        async def slow_restart() -> Any:
            await gate.wait()
            return await restart()

        def once(plan: Any) -> None:
            if left:
                left.clear()
                raise RuntimeError("it died")

        monkeypatch.setattr(worker_host, "restart", slow_restart)
        hosts.worker.on_launch = once
        request = {"model": "tiny", "prompt": MARKER, "max_tokens": 4, "ignore_eos": True}

        async def probed(status: int, number: int) -> list[httpx.Response]:
            """So many answers in a row, each on a connection of its own."""
            seen: list[httpx.Response] = []
            with anyio.fail_after(60):
                while len(seen) < number:
                    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client:
                        answer = await client.get("/readyz")
                        assert (await client.get("/livez")).status_code == 200
                    seen = [*seen, answer] if answer.status_code == status else []
            return seen

        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client,
            anyio.create_task_group() as group,
        ):
            answers: list[httpx.Response] = []

            async def ask() -> None:
                answers.append(await client.post("/v1/completions", json=request))

            group.start_soon(ask)
            for refused in await probed(503, 4):
                assert "engine_restarting" in refused.json()["reasons"][0]
            gate.set()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 4
        await probed(200, 4)


async def test_fronts_that_cannot_start_fail_the_opening(tiny_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MODULE", "troupellm.server.api_processes.no_such_module")
    config = server_config(api_server_count=2)
    async with tiny_engine() as engine, running_fleet(config) as (fleet, _):
        with pytest.raises(ApiProcessesFailed, match="exit code 1"):
            await fleet.open(engine)
        assert isinstance(await fleet.failure(), ApiProcessesFailed)
        restarts = fleet._supervisor.restarts
        assert max(restarts.values()) == fleets.INTENSITY.restarts


class MortalFront:
    """Dies after so many seconds of a clock that knows no others; the last one returns."""

    def __init__(self, clock: HandClock, seconds: float, lives: list[int]) -> None:
        self._clock, self._seconds, self._lives = clock, seconds, lives

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        self._clock.time += self._seconds
        if self._lives:
            self._lives.pop()
            raise members.ApiProcessDied("it has not been heard of")


def supervised(clock: HandClock, seconds: float, lives: int) -> Supervisor:
    left = [0] * lives
    build = partial(MortalFront, clock, seconds, left)
    child = Child(name="front-0", build=build, strategy="restart", on_crash=lambda cause, owed: None)
    return Supervisor([child], clock, fleets.INTENSITY)


START_SECONDS = 30.0
"""Of Python, on a busy machine."""
DEAF_SECONDS = members.DEAF_REPORTS * members.STATUS_SECONDS


@pytest.mark.parametrize("seconds", [0.0, members.GREETING_SECONDS, DEAF_SECONDS, START_SECONDS + DEAF_SECONDS])
async def test_a_front_that_always_hangs_takes_the_server_down_within_minutes(seconds: float) -> None:
    clock = HandClock()
    with pytest.raises(members.ApiProcessDied, match="heard of"):
        await supervised(clock, seconds, 1000).run()
    assert clock.time <= 600.0


async def test_a_front_that_dies_now_and_then_never_does() -> None:
    clock = HandClock()
    await supervised(clock, 150.0, 200).run()
    assert clock.time == 201 * 150.0


async def test_a_fleet_that_is_stopped_while_it_starts_leaves_nothing() -> None:
    async with running_fleet(server_config(api_server_count=3)) as (fleet, _):
        await until(lambda: len(pids_of(fleet)) == 3)
        children = pids_of(fleet)
    assert not any(psutil.pid_exists(pid) for pid in children)
