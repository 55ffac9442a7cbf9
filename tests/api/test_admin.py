"""The admin routes over real sockets: behind their key, at their unix socket, and over front processes."""

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.processes import MODES, ready_process
from troupellm.tests.support.servers.serving import events_of, eventually, running_server, server_config

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer root-key"}
STREAM = {"model": "tiny", "prompt": "once", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
STREAM |= {"return_token_ids": True}


def tokens(body: str) -> list[int]:
    return [token for event in events_of(body) for token in event["choices"][0].get("token_ids", ())]


async def post(client: httpx.AsyncClient, path: str, **options: Any) -> dict[str, Any]:
    response = await client.post(path, headers=ADMIN, **options)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    response = await client.get(path, headers=ADMIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_pause_sleep_and_what_is_told_of_them(tiny_engine: Any, tmp_path: Path) -> None:
    config = server_config(admin_api_key=("root-key",), profile_dir=str(tmp_path / "traces"))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        solo = tokens((await client.post("/v1/completions", json=STREAM)).text)
        got: list[str] = []

        async def stream() -> None:
            got.append((await client.post("/v1/completions", json=STREAM)).text)

        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            await eventually(lambda: engine.snapshot().scheduler.running == 1)
            state = await post(client, "/pause?mode=keep&clear_cache=false")
            assert state == {"is_paused": True, "is_sleeping": False, "sleep_level": None}
            assert (await get(client, "/is_paused")) == {"is_paused": True}
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["the engine is paused"])
            assert (await client.get("/livez")).status_code == 200
            assert (await post(client, "/resume"))["is_paused"] is False
            asleep = await post(client, "/sleep?level=2&mode=keep")
            assert (asleep["is_sleeping"], asleep["sleep_level"]) == (True, 2)
            assert asleep["rss_before"] - asleep["rss_after"] == asleep["freed_bytes"]
            refused = await client.post("/v1/completions", json=STREAM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
            assert refused.headers["retry-after"]
            for path in ("/resume", "/pause?mode=wait", "/sleep?level=2&mode=wait"):
                assert (await client.post(path, headers=ADMIN)).status_code == 409, path
            text = (await client.get("/metrics")).text
            state_lines = [line for line in text.splitlines() if line.startswith("vllm:engine_sleep_state{")]
            assert [line.split()[-1] for line in state_lines if "discard_all" in line] == ["1.0"]
            assert (await get(client, "/is_sleeping")) == {"is_sleeping": True}
            assert (await post(client, "/wake_up?tags=weights"))["is_sleeping"] is True
            assert (await post(client, "/wake_up?tags=kv_cache&tags=scheduling"))["is_sleeping"] is False
        assert [tokens(body) for body in got] == [solo]
        assert (await client.get("/readyz")).status_code == 200


async def test_an_admin_ends_requests_by_id_or_all(tiny_engine: Any) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        ended: list[dict[str, Any]] = []
        names: list[str] = []

        async def stream() -> None:
            long = STREAM | {"max_tokens": 4000}
            async with client.stream("POST", "/v1/completions", json=long) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            ended.append(event["error"])
                        else:
                            names.append(event["id"])

        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            await eventually(lambda: bool(names))
            nobody = await post(client, "/abort_requests", json={"request_ids": ["cmpl-0"]})
            assert nobody == {"aborted": 0}
            assert await post(client, "/abort_requests", json={"request_ids": [names[0]]}) == {"aborted": 1}
        assert ended[0]["code"] == "request_aborted"
        assert ended[0]["message"].endswith(" (request_aborted)")
        names.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            await eventually(lambda: bool(names))  # before its first event it would be refused, and no stream
            assert await post(client, "/abort_requests", json={"all": True}) == {"aborted": 1}
        assert len(ended) == 2
        for body in ({}, {"all": True, "request_ids": ["x"]}, {"request_ids": ["x"] * 1025}):
            assert (await client.post("/abort_requests", headers=ADMIN, json=body)).status_code == 400


async def test_facts_profiles_and_log_levels(tiny_engine: Any, tmp_path: Path) -> None:
    config = server_config(admin_api_key=("root-key",), api_key=("sk-user",), profile_dir=str(tmp_path / "traces"))
    async with (
        tiny_engine(hf_token="hf_secret") as engine,
        running_server(engine, config) as served,
        served.client(key="sk-user") as client,
    ):
        info = await get(client, "/server_info")
        assert info["limits"]["max_model_len"] == engine.limits.max_model_len
        assert info["engine_config"]["scheduler"]["max_num_seqs"] == engine.config.scheduler.max_num_seqs
        assert not any(secret in json.dumps(info) for secret in ("root-key", "sk-user", "hf_secret"))
        assert (await get(client, "/debug/snapshot"))["scheduler"]["blocks_total"] > 0
        assert await post(client, "/reset_prefix_cache") == {"success": True}
        await post(client, "/start_profile?max_iterations=3&prefix=mine")
        assert (await client.post("/start_profile", headers=ADMIN)).json()["error"]["code"] == "profile_running"
        await client.post("/v1/completions", json=STREAM | {"max_tokens": 5, "stream": False})
        profile = await post(client, "/stop_profile")
        assert profile["steps"] == 3
        assert profile["file"].startswith("mine-")
        assert (tmp_path / "traces" / profile["file"]).is_file()
        before = (await get(client, "/log_level"))["level"]
        assert await post(client, "/log_level", json={"level": "debug"}) == {"level": "debug"}
        assert (await get(client, "/log_level")) == {"level": "debug"}
        await post(client, "/log_level", json={"level": before})
        for path in (
            "/sleep?levle=2",
            "/pause?mode[]=keep",
            "/resume?bogus=1",
            "/is_paused?x",
            "/log_level?level=debug",
        ):
            method = "GET" if path.startswith("/is_") else "POST"
            refused = await client.request(method, path, headers=ADMIN, json={"level": before})
            name = path.partition("?")[2].partition("=")[0]
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert (await get(client, "/is_sleeping")) == {"is_sleeping": False}
        assert (await get(client, "/is_paused")) == {"is_paused": False}
        document = (await client.get("/openapi.json")).json()
        assert "cancel a batch" in document["paths"]["/abort_requests"]["post"]["summary"]
        for path in (
            "/reset_prefix_cache?reset_running_requests=true",
            "/start_profile?prefix=../x",
            "/sleep?level=3",
            "/sleep?mode=later",
            "/pause?mode=x",
            "/wake_up?tags=all",
        ):
            assert (await client.post(path, headers=ADMIN)).status_code == 400, path
        assert (await client.post("/log_level", headers=ADMIN, json={"level": "loud"})).status_code == 400


async def test_a_command_that_is_refused_is_told_to_its_caller_alone(
    tiny_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        refused = await client.post("/stop_profile", headers=ADMIN)
        assert refused.json()["error"]["code"] == "no_profile"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_profiles_need_a_folder(tiny_engine: Any) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        refused = await client.post("/start_profile", headers=ADMIN)
        assert refused.json()["error"]["code"] == "not_configured"


@pytest.mark.slow
@pytest.mark.parametrize("flags", MODES)
async def test_a_server_process_sleeps_by_key_and_by_socket(
    checkpoint: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The memory of the worker's process goes down; streams that were kept go on, wherever they came in."""
    uds = str(tmp_path / "admin.sock")
    given = ("--admin-api-key", "root-key", "--admin-uds", uds, *flags)
    async with ready_process(checkpoint, *given, spare=True) as server, server.client() as client:
        transport = httpx.AsyncHTTPTransport(uds=uds)
        async with httpx.AsyncClient(base_url="http://admin", transport=transport) as socket:
            solo = tokens((await client.post("/v1/completions", json=STREAM)).text)
            got: list[str] = []

            async def stream() -> None:
                got.append((await client.post("/v1/completions", json=STREAM)).text)

            async with anyio.create_task_group() as group:
                group.start_soon(stream)
                await server.until(lambda: server.metric("troupellm_requests_running"), 1)
                slept = await post(client, "/sleep?level=2&mode=keep")
                assert slept["rss_before"] > slept["rss_after"] > 0
                assert (await get(client, "/is_sleeping")) == {"is_sleeping": True}
                assert (await socket.get("/is_sleeping")).json() == {"is_sleeping": True}
                assert (await client.post("/resume", headers=ADMIN)).status_code == 409
                woken = await socket.post("/wake_up")
                assert woken.json()["is_sleeping"] is False
            assert [tokens(body) for body in got] == [solo]
            assert (await socket.post("/log_level", json={"level": "error"})).json() == {"level": "error"}
            assert (await get(client, "/log_level")) == {"level": "error"}
            assert (await socket.get("/v1/models")).status_code == 404
            async with anyio.create_task_group() as group:
                group.start_soon(stream)
                await server.until(lambda: server.metric("troupellm_requests_running"), 1)
                assert await post(client, "/abort_requests", json={"all": True}) == {"aborted": 1}
            assert '"code":"request_aborted"' in got[-1]
            paused = await post(client, "/pause?mode=keep")
            assert paused["is_paused"]
            with anyio.fail_after(10):
                while (await client.get("/readyz")).status_code != 503:  # noqa: ASYNC110 - fronts hear of it
                    await anyio.sleep(0.02)
            await post(client, "/resume")
