"""`troupellm serve -dp 2` as a process: what clients, probes and scrapers see while replicas die and restart."""

import json
import os
import signal
from functools import partial
from typing import Any

import anyio
import httpx
import psutil
import pytest

from troupellm import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.actors.replicas.replica import spawn_process
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.server.serve.run import REPLICA_MODULE
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.processes import ON_A_THREAD, ServerProcess, ready_process, serving_process
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BODY = {"model": "tiny", "prompt": "Once", "temperature": 1.0, "seed": 4, "ignore_eos": True}
ADMIN = {"authorization": "Bearer root"}
FLAGS = ("-dp", "2", *ON_A_THREAD, "--admin-api-key", "root", "--metrics", "open")


async def streamed(client: httpx.AsyncClient, began: anyio.Event | None = None, tokens: int = 800) -> str:
    text, ends = "", 0
    async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": tokens}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"]
                ends += choice["finish_reason"] == "length"
                if began is not None and len(text) > 20:
                    began.set()
    assert ends == 1
    return text


async def replicas(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/debug/snapshot", headers=ADMIN)).json()["replicas"]
    return found


async def all_ready(client: httpx.AsyncClient) -> None:
    with anyio.fail_after(60):
        while (await client.get("/readyz")).json()["reasons"]:  # noqa: ASYNC110 - another process's state
            await anyio.sleep(0.1)


async def busy(client: httpx.AsyncClient) -> dict[str, Any]:
    """The replica that has the one request."""
    return next(each for each in await replicas(client) if each["requests"])


async def test_R9_clients_of_a_server_do_not_notice_that_a_replica_died(checkpoint: Any) -> None:
    async with ready_process(checkpoint, *FLAGS) as server, server.client() as client:
        await _headers(client)
        whole = await streamed(client)
        assert (await client.get("/readyz")).json()["reasons"] == []
        texts: list[str] = []

        async def ask(began: anyio.Event) -> None:
            texts.append(await streamed(client, began))

        async with anyio.create_task_group() as group:
            began = anyio.Event()
            group.start_soon(ask, began)
            await began.wait()
            victim = await busy(client)
            os.kill(victim["pid"], signal.SIGKILL)
            await _missing(client, victim["number"])
        await all_ready(client)
        async with anyio.create_task_group() as group:
            began = anyio.Event()
            group.start_soon(ask, began)
            await began.wait()
            assert (await client.post("/restart_replicas", headers=ADMIN)).json() == {"success": True}
        assert texts == [whole, whole]
        await _metrics(client)
        await _ends(server)


async def _headers(client: httpx.AsyncClient) -> None:
    for rank, sentence in (("99", "must be in 0..1, got 99"), ("-1", "must be the number of a replica, got -1")):
        answer = await client.post("/v1/completions", json=BODY, headers={"X-data-parallel-rank": rank})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "X-data-parallel-rank"
    for rank in ("0", "1"):
        body = BODY | {"max_tokens": 4}
        answer = await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
        assert answer.json()["usage"]["completion_tokens"] == 4
    lines = (await client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    for rank in ("0", "1"):
        assert [float(line.split()[-1]) >= 4 for line in told if f'engine="{rank}"' in line] == [True]


async def _missing(client: httpx.AsyncClient, number: int) -> None:
    """Ready all the same, and which one is missing. The signal is known once the dead process has been waited for."""
    with anyio.fail_after(10):
        while "signal 9" not in "".join(reasons := (await client.get("/readyz")).json()["reasons"]):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    assert (await client.get("/readyz")).status_code == 200
    assert reasons[0].startswith(f"replica {number}: its process ended by signal 9")


async def _metrics(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    assert 'troupellm_failovers_total{reason="died"} 1.0' in text
    assert 'troupellm_failovers_total{reason="drained"}' in text
    assert 'troupellm_replica_up{engine="1"} 1.0' in text
    assert text.count("# TYPE troupellm_requests_running gauge") == 1


async def _ends(server: ServerProcess) -> None:
    children = server.note_children()
    server.signal(signal.SIGTERM)
    assert await server.exit_code(20) == 0
    assert not any(psutil.pid_exists(pid) for pid in children)


async def test_R10_no_replica_outlives_a_server_that_is_killed(checkpoint: Any) -> None:
    async with ready_process(checkpoint, *FLAGS) as server:
        children = server.note_children()
        assert len(children) >= 2
        os.kill(server.pid, signal.SIGKILL)
        with anyio.fail_after(5):
            while any(psutil.pid_exists(pid) for pid in children):  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("-dp", "2", "--api-server-count", "1"), "api_server_count must be 0 with data_parallel_size above 1"),
        (("-dp", "65"), "data_parallel_size"),
        (("-dp", "2", "--data-parallel-router", "hash"), "data_parallel_router"),
    ],
)
async def test_R11_a_start_that_cannot_work_fails_at_once(checkpoint: Any, flags: Any, sentence: str) -> None:
    async with serving_process(checkpoint, *flags) as server:
        assert await server.exit_code(30) == 2
    assert server.logged(sentence) or server.logged(sentence.replace("_", "-"))


async def test_R1_streams_of_killed_and_stopped_processes_end_with_their_solo_tokens(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupellm.actors.replicas.replica.DEAF_REPORTS", 12)
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 1500, "ignore_eos": True}
    async with Engine(checkpoint, **SETTINGS) as engine:
        solo = (await engine.generate([5, 6, 7], **sampling)).token_ids
    given = SETTINGS | {"model": str(checkpoint), "data_parallel_size": 2, "worker_process": False}
    spawn = partial(spawn_process, REPLICA_MODULE)
    async with Fleet(EngineConfig.from_flat(given), server_config(), spawn) as fleet:
        for number, harm in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            await eventually(lambda: fleet.missing() == [], SPARE_SECONDS)
            tokens: list[int] = []
            async with fleet.stream([5, 6, 7], **sampling, hints=KVHints(replica=number)) as stream:
                tokens += (await anext(stream)).token_ids
                pid = fleet.replicas[number].pid
                assert pid is not None
                os.kill(pid, harm)
                async for delta in stream:
                    tokens += delta.token_ids
            assert tuple(tokens) == solo
        children = [each.pid for each in fleet.replicas]
    assert not any(pid and psutil.pid_exists(pid) for pid in children)
