"""Rows E4, E8, E11 and E12 of the fault table on the real server process: an actor falls for good, a wake-up is lost,
the wall clock jumps, the process is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.canary import beside_canaries, under_attack
from troupellm.tests.support.servers.processes import MODES, Leftovers, alive, every_other, free_port, ready_process
from troupellm.tests.support.servers.serving import events_of, eventually, server_config

pytestmark = pytest.mark.anyio

HOUR = 3600.0
SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
GONE_SECONDS = 2.0
ENDED_SECONDS = 10.0
"""The row wants one second; the rest is for a busy machine to end a process and to tell of it."""
THREE = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))]
ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))


async def test_E11_only_created_follows_a_jump_of_the_wall_clock(tiny_engine, monkeypatch):
    """Every deadline is short enough to pass within an hour, and none may."""
    wall, offset = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + offset)
    settings = {"stall_timeout": 30.0, "step_timeout": 30.0}
    config = server_config(write_timeout=30.0, body_timeout=30.0, sse_keep_alive_interval=15.0)
    async with tiny_engine(**settings) as engine, under_attack(engine, config) as attacked:
        created = []
        request = SHORT | {"max_tokens": 50, "stream": True}
        for jump in (0.0, HOUR, -HOUR, HOUR):
            async with attacked.client.stream("POST", "/v1/completions", json=request) as response:
                pieces = []
                async for piece in response.aiter_text():
                    if not pieces:
                        offset = jump
                    pieces.append(piece)
            events = events_of("".join(pieces))
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert ": keep-alive" not in "".join(pieces)
            answer = await attacked.client.post("/v1/completions", json=SHORT)
            created.append(answer.json()["created"] - wall())
            assert (await attacked.client.get("/readyz")).status_code == 200
        assert [round(shift / HOUR) for shift in created] == [0, 1, -1, 1]
        snapshot = engine.snapshot()
        assert 0 <= snapshot.uptime_seconds < HOUR
        assert snapshot.last_step_age_seconds is not None
        assert 0 <= snapshot.last_step_age_seconds < HOUR


async def streamed(client: httpx.AsyncClient, began: anyio.Event, pieces: list[str]) -> None:
    """A long answer, as far as it came."""
    request = SHORT | {"max_tokens": 3000, "stream": True}
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for piece in response.aiter_text():
                pieces.append(piece)
                began.set()
    except httpx.TransportError:  # cut without a last chunk
        pieces.append("(cut)")


@pytest.mark.parametrize("attempt", THREE)
@pytest.mark.parametrize("actor", ["scheduler", pytest.param("worker", marks=pytest.mark.slow)])
async def test_E4_a_server_whose_actor_cannot_come_back_ends_with_code_1(checkpoint, tmp_path, actor, attempt):
    """Waiting clients are told so, or cut: no answer ends as if it were whole."""
    broken = tmp_path / "broken"
    environment = {"ODD_BREAK_WHEN": str(broken), "ODD_BREAK": actor}
    async with (
        ready_process(checkpoint, *every_other(attempt + 1), prefix=ODD, environment=environment) as server,
        server.client() as client,
    ):
        answers: list[list[str]] = [[] for _ in range(4)]
        async with anyio.create_task_group() as group:
            for pieces in answers:
                began = anyio.Event()
                group.start_soon(streamed, client, began, pieces)
                await began.wait()
            broken.touch()
            assert await server.exit_code(ENDED_SECONDS) == 1
        for pieces in answers:
            text = "".join(pieces)
            assert text.endswith("(cut)") or '"code":"engine_failed"' in text
            assert '"finish_reason":"' not in text
        await eventually(lambda: bool(server.logged(f"odd: {actor} broke")))
        await eventually(lambda: not alive(server.children), GONE_SECONDS)


@pytest.mark.slow  # `make test` has engines that do so, in `test_E_engine` and in the simulator
@pytest.mark.parametrize("attempt", range(3))
async def test_E8_a_server_notices_a_lost_wake_up_and_mends_it(checkpoint, tmp_path, attempt):
    lost = tmp_path / "lost"
    environment = {"ODD_LOSE_WHEN": str(lost)}
    flags = ("--watchdog-timeout", "1", *every_other(attempt))
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment=environment) as server,
        beside_canaries(server),
        server.client() as client,
    ):
        request = SHORT | {"max_tokens": 30, "return_token_ids": True}
        solo = (await client.post("/v1/completions", json=request)).json()["choices"][0]["token_ids"]
        lost.touch()
        again = await client.post("/v1/completions", json=request)
        assert again.status_code == 200, again.text
        assert again.json()["choices"][0]["token_ids"] == solo
        assert not lost.exists(), "no wake-up was lost"
        await eventually(lambda: bool(server.logged("no progress")))
        with anyio.fail_after(ENDED_SECONDS):
            while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.05)


def jump(offset: Path, seconds: float) -> None:
    """For the server to read as a whole."""
    new = offset.with_suffix(".new")
    new.write_text(str(seconds))
    os.replace(new, offset)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
async def test_E11_only_created_follows_a_jump_of_a_server_s_wall_clock(checkpoint, tmp_path, attempt):
    """As above, on a process of its own: every deadline is short enough to pass within an hour."""
    offset = tmp_path / "offset"
    jump(offset, 0)
    deadlines = ("--stall-timeout", "30", "--step-timeout", "30", "--write-timeout", "30", "--body-timeout", "30")
    flags = (*deadlines, *every_other(attempt))
    environment = {"ODD_WALL_OFFSET": str(offset)}
    request = SHORT | {"max_tokens": 50, "stream": True}
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment=environment) as server,
        beside_canaries(server),
        server.client() as client,
    ):
        created = []
        for seconds in (0.0, HOUR, -HOUR, HOUR):
            async with client.stream("POST", "/v1/completions", json=request) as response:
                pieces = []
                async for piece in response.aiter_text():
                    if not pieces:
                        jump(offset, seconds)
                    pieces.append(piece)
            events = events_of("".join(pieces))
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert ": keep-alive" not in "".join(pieces)
            answer = await client.post("/v1/completions", json=SHORT)
            created.append(answer.json()["created"] - time.time())
            assert (await client.get("/readyz")).status_code == 200
        assert [round(shift / HOUR) for shift in created] == [0, 1, -1, 1]


@pytest.mark.slow  # `make test` has row I6, which kills a server and starts the next one, too
@pytest.mark.parametrize("attempt", range(20))
@pytest.mark.parametrize("flags", MODES)
async def test_E12_a_killed_server_leaves_nothing_behind(checkpoint, tmp_path, flags, attempt):
    environment = {"TMPDIR": str(tmp_path)}
    port, leftovers = free_port(), Leftovers(tmp_path)
    request = SHORT | {"max_tokens": 3000, "stream": True}
    async with (
        ready_process(checkpoint, *flags, port=port, environment=environment, spare=True) as server,
        server.client() as client,
        client.stream("POST", "/v1/completions", json=request) as response,
    ):
        pieces = response.aiter_text()
        await anext(pieces)
        children = server.note_children()
        server.signal(signal.SIGKILL)
        with anyio.fail_after(GONE_SECONDS):
            await server.process.wait()
            while alive(children):  # noqa: ASYNC110 - other processes' state
                await anyio.sleep(0.01)
        rest: list[str] = []
        try:
            async for piece in pieces:
                rest.append(piece)
        except httpx.TransportError:  # cut without a last chunk
            pass
        else:  # a front that outlived the engine for a moment has said so: never silently short
            assert flags
            assert '"code":"engine_failed"' in "".join(rest)
    assert leftovers.new() == set()
    async with (
        ready_process(checkpoint, *flags, port=port, environment=environment) as server,
        server.client() as client,
    ):
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
        server.signal(signal.SIGTERM)
        assert await server.exit_code(5) == 0
    assert leftovers.new() == set()


@pytest.mark.slow  # `make test` has a dead socket that is taken over by the next listener
async def test_E12_a_killed_server_s_unix_socket_is_taken_over(checkpoint, tmp_path):
    path = tmp_path / "socket"
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    for number in (signal.SIGKILL, signal.SIGTERM):
        async with (
            ready_process(checkpoint, "--uds", str(path)) as server,
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            server.signal(number)
            await server.exit_code(5)
            assert path.exists() == (number == signal.SIGKILL)
