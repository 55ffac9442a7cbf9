"""Rows E11 and E12 of the fault table: the wall clock jumps, the server process is killed."""

import signal
import time

import anyio
import httpx
import pytest
from canary import under_attack
from processes import MODES, Leftovers, alive, free_port, ready_process
from serving import events_of, server_config

pytestmark = pytest.mark.anyio

HOUR = 3600.0
SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
GONE_SECONDS = 2.0
TWENTY = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))]


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


@pytest.mark.parametrize("attempt", TWENTY)
@pytest.mark.parametrize("flags", MODES)
async def test_E12_a_killed_server_leaves_nothing_behind(checkpoint, tmp_path, flags, attempt):
    environment = {"TMPDIR": str(tmp_path)}
    port, leftovers = free_port(), Leftovers(tmp_path)
    request = SHORT | {"max_tokens": 3000, "stream": True}
    async with (
        ready_process(checkpoint, *flags, port=port, environment=environment) as server,
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
