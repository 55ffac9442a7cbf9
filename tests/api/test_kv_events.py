"""`GET /kv_events`: behind the admin key, as events or as one answer, and off unless asked for."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.tests.support.servers.processes import MODES, ready_process
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer root-key"}
PROMPT = {"model": "tiny", "prompt": "a story that is long enough to fill two blocks of sixteen", "max_tokens": 2}


async def test_events_come_as_they_happen_and_slow_readers_hear_of_gaps(tiny_engine: Any) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with (
        tiny_engine(kv_events="keys", kv_events_buffer=3) as engine,
        running_server(engine, config) as served,
        served.client() as client,
    ):
        assert (await client.get("/kv_events")).status_code == 401
        got: list[dict[str, Any]] = []
        async with client.stream("GET", "/kv_events?after=0", headers=ADMIN) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
            with anyio.fail_after(30):
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        got.append(json.loads(line[6:]))
                    if len(got) == 2:
                        break
        assert [event["event"] for event in got] == ["stored", "stored"]
        assert got[1]["parent"] == got[0]["key"]
        assert "token_ids" not in got[0] or got[0]["token_ids"] == []
        for number in range(3):
            await client.post("/v1/completions", json=PROMPT | {"prompt": str(number) * 40})
        answer = (await client.get("/kv_events?after=1&stream=false", headers=ADMIN)).json()
        assert answer["events"][0]["event"] == "gap"
        assert answer["events"][0]["dropped"] == answer["events"][0]["seq"] - 1
        assert len(answer["events"]) == 4
        assert answer["last"] == answer["events"][-1]["seq"]
        assert (await client.get("/kv_events?after=-1", headers=ADMIN)).status_code == 400
        refused = await client.get("/kv_events?after=1&snapshot=true", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "snapshot")
        found = (await client.get("/kv_events?snapshot=true&stream=false", headers=ADMIN)).json()
        assert [event["event"] for event in found["events"]] == ["snapshot"] + ["stored"] * found["events"][0]["blocks"]
        assert found["events"][0]["blocks"] > 3, "more than the buffer keeps"
        assert found["last"] == found["events"][0]["seq"]
        async with client.stream("GET", "/kv_events?snapshot=true", headers=ADMIN) as stream:
            with anyio.fail_after(30):
                told = [json.loads(line[6:]) async for line in _data(stream.aiter_lines(), len(found["events"]))]
        assert told == found["events"]


async def _data(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith("data: "):
            yield line
            count -= 1
        if not count:
            return


async def test_without_the_setting_there_are_none(tiny_engine: Any) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        answer = await client.get("/kv_events", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_configured")


@pytest.mark.slow
@pytest.mark.parametrize("flags", MODES)
async def test_kv_events_are_followed_from_any_process_layout(checkpoint: Path, flags: tuple[str, ...]) -> None:
    given = ("--admin-api-key", "root-key", "--kv-events", "keys", *flags)
    async with ready_process(checkpoint, *given) as server, server.client() as client:
        got: list[dict[str, Any]] = []
        async with client.stream("GET", "/kv_events?after=0", headers=ADMIN) as stream:
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
            with anyio.fail_after(60):
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        got.append(json.loads(line[6:]))
                    if len(got) == 3:
                        break
        assert [(event["seq"], event["event"]) for event in got] == [(1, "stored"), (2, "stored"), (3, "stored")]
