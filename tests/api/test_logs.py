"""The server's log, and that an embedded engine neither logs nor configures logging."""

import json
import logging
import signal

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.processes import (
    ON_A_THREAD,
    START_SECONDS,
    free_port,
    ready_process,
    serving_process,
)
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

REQUEST = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
PROBES = ("/health", "/readyz", "/livez", "/startupz", "/ping", "/metrics")


def fields_of(caplog) -> list[dict]:
    return [record.fields for record in caplog.records if record.name == "troupellm.access"]


async def test_one_access_line_per_request(tiny_engine, caplog):
    caplog.set_level(logging.INFO, logger="troupellm.access")
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path in PROBES:
            assert (await client.get(path)).status_code == 200
        for extra in ({}, {"stream": True}, {"n": 2}, {"temperature": 9}):
            await client.post("/v1/completions", json=REQUEST | extra, headers={"x-request-id": f"id-{len(extra)}"})
        await client.get("/v1/models")
        await client.get("/nothing%0Ahere")
        await anyio.lowlevel.checkpoint()
    lines = fields_of(caplog)
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        *[("POST", "/v1/completions", 200)] * 3,
        ("POST", "/v1/completions", 400),
        ("GET", "/v1/models", 200),
        ("GET", "/nothing%0Ahere", 404),
    ]
    assert [line.get("prompt_tokens") for line in lines] == [4, 4, 4, None, None, None]
    assert [line.get("completion_tokens") for line in lines] == [5, 5, 10, None, None, None]
    for line in lines[:3]:
        assert 0 < line["ttft_ms"] <= line["ms"]
        assert line["request_id"].startswith("id-")
    assert not any("key" in line for line in lines)


async def test_a_client_that_left_is_told_apart(tiny_engine, caplog):
    caplog.set_level(logging.INFO, logger="troupellm.access")
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        request = REQUEST | {"stream": True, "max_tokens": 3000}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for _ in response.aiter_text():
                break
        with anyio.fail_after(10):
            while not fields_of(caplog):  # noqa: ASYNC110 - a log announces nothing
                await anyio.sleep(0.01)
    (line,) = fields_of(caplog)
    assert line["status"] == 499
    assert line["prompt_tokens"] == 4
    assert 0 < line["completion_tokens"] < 3000


async def test_access_lines_can_be_turned_off(tiny_engine, caplog):
    caplog.set_level(logging.INFO, logger="troupellm.access")
    config = server_config(disable_access_log=True)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        assert (await client.post("/v1/completions", json=REQUEST)).status_code == 200
    assert not fields_of(caplog)


async def test_the_log_of_a_server_as_json(checkpoint):
    flags = ("--log-format", "json", "--log-stats-interval", "0.2", "--api-key", "secret-of-alice")
    async with ready_process(checkpoint, *flags) as server, server.client(key="secret-of-alice") as client:
        with anyio.fail_after(20):
            while not server.logged("troupellm.stats"):
                assert (await client.post("/v1/completions", json=REQUEST)).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        entries = [json.loads(line) for line in server.log]
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    stats = next(entry for entry in entries if entry["logger"] == "troupellm.stats")
    assert stats["message"].startswith("Avg prompt throughput: ")
    assert stats["generation_tokens_per_second"] > 0
    access = [entry for entry in entries if entry["logger"] == "troupellm.access"]
    assert access
    assert all(entry["key"] and entry["completion_tokens"] == 5 for entry in access)
    assert "secret-of-alice" not in "".join(server.log)


async def test_levels_and_switches_of_the_log(checkpoint):
    flags = (*ON_A_THREAD, "--log-level", "warning", "--log-stats-interval", "0.1")
    port = free_port()
    async with serving_process(checkpoint, *flags, port=port) as server:
        server.url = f"http://127.0.0.1:{port}"
        async with server.client() as client:
            with anyio.fail_after(START_SECONDS):
                while not await _answers(client):  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.05)
        server.signal(signal.SIGTERM)
        assert await server.exit_code(5) == 0
        assert server.log == []


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.post("/v1/completions", json=REQUEST)).status_code == 200
    except httpx.ConnectError:
        return False


def test_an_embedded_engine_configures_no_logging(tiny_engine, capfd):
    names = [name for name in logging.root.manager.loggerDict if name.startswith("troupellm")]
    before = [(list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names]
    roots = list(logging.root.handlers), logging.root.level

    async def main() -> None:
        async with tiny_engine() as engine:
            await engine.generate("Once", max_tokens=5)

    anyio.run(main)
    assert [(list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names] == before
    assert (list(logging.root.handlers), logging.root.level) == roots
    assert capfd.readouterr() == ("", "")
