"""Rows D1, D3, E3 and I2 of the fault table on the responses and messages APIs."""

import json
import signal
import socket
import sys
from pathlib import Path

import anyio
import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.worker import RowError, StepResult
from troupellm.server.storage.responses import ResponseStore
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.processes import ready_process
from troupellm.tests.support.servers.serving import eventually, http_request, server_config
from troupellm.tests.support.workers.meddler import WorkerHosts, changed

pytestmark = pytest.mark.anyio

ENDLESS = {"model": "tiny", "temperature": 0, "ignore_eos": True}
BODIES = {
    "/v1/responses": ENDLESS | {"input": "Hi", "max_output_tokens": 3000},
    "/v1/messages": ENDLESS | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000},
}
ROUTES = tuple(BODIES)
ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))
PACE = {"ODD_STEP_SECONDS": "0.01"}
DELTA = {"/v1/responses": b"response.output_text.delta", "/v1/messages": b"text_delta"}
FIRST_CHAT_TOKEN = 257
"""Prompts of chats begin with it, and those of the canaries do not."""


def events_of(text):
    """The data of events that all have their type as name."""
    bodies = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        bodies.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {bodies[-1]['type']}"
    return bodies


@pytest.mark.parametrize("path", ROUTES)
async def test_D3_leaving_ends_the_request(tiny_engine, path):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for stream in (True, False):
            before = engine.snapshot().scheduler.tokens_generated
            connection = await attacked.served.raw(http_request(path, BODIES[path] | {"stream": stream}))
            if stream:
                await connection.read_until(DELTA[path])
            else:
                await eventually(lambda seen=before: engine.snapshot().scheduler.tokens_generated > seen + 150)
            await connection.close()
            await eventually(lambda: len(attacked.served.host.in_flight) < 3)
        stored = (await attacked.client.get("/metrics")).text
    assert "troupellm_responses_stored 0.0" in stored, "nobody has the whole answer"


@pytest.mark.parametrize("path", [ROUTES[0], pytest.param(ROUTES[1], marks=pytest.mark.slow)])
async def test_D1_a_stalled_reader_is_paused(tiny_engine, path):
    config = server_config(sse_send_buffer=4096)
    async with tiny_engine(stream_budget_tokens=64) as engine, under_attack(engine, config) as attacked:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await anyio.to_thread.run_sync(connect, plain, attacked.served.port)
        await anyio.wait_writable(plain)
        plain.send(http_request(path, BODIES[path] | {"stream": True}))
        await eventually(lambda: engine.snapshot().scheduler.paused > 0, 60)
        plain.close()


def connect(plain, port):
    plain.setblocking(True)
    plain.connect(("127.0.0.1", port))
    plain.setblocking(False)


async def test_D3_a_background_response_outlives_whoever_asked_for_it(tiny_engine):
    body = BODIES["/v1/responses"] | {"max_output_tokens": 300, "background": True, "stream": True}
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        connection = await attacked.served.raw(http_request("/v1/responses", body))
        seen = await connection.read_until(b"response.in_progress")
        await connection.close()
        name = "resp_" + seen.partition(b'"id":"resp_')[2][:32].decode()
        found = {"status": "queued"}
        with anyio.fail_after(20):
            while found["status"] in ("queued", "in_progress"):
                found = (await attacked.client.get(f"/v1/responses/{name}")).json()
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 300)


async def test_D3_followers_of_a_background_response_may_leave(tiny_engine):
    body = BODIES["/v1/responses"] | {"background": True, "stream": True}
    async with tiny_engine() as engine, under_attack(engine) as attacked:

        def following():
            paths = [one.route for one in attacked.served.host.in_flight]
            return paths.count("/v1/responses/{response_id}")

        first = await attacked.served.raw(http_request("/v1/responses", body))
        seen = await first.read_until(b"response.in_progress")
        name = "resp_" + seen.partition(b'"id":"resp_')[2][:32].decode()
        ask = f"GET /v1/responses/{name}?stream=true&starting_after=1 HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        others = [await attacked.served.raw(ask) for _ in range(3)]
        for other in others:
            await other.read_until(b"response.output_text.delta")
        assert following() == 3
        for other in others:
            await other.close()
        await eventually(lambda: following() == 0)
        found = (await attacked.client.get(f"/v1/responses/{name}")).json()
        cancelled = (await attacked.client.post(f"/v1/responses/{name}/cancel")).json()
        rest = await first.read_until(b"response.failed")
        await first.close()
    assert (found["status"], cancelled["status"]) == ("in_progress", "cancelled")
    assert b"response_cancelled" in rest


@pytest.mark.parametrize("after", [0, 20])
async def test_E3_an_error_of_one_row_is_told_in_each_apis_own_way(tiny_engine, after):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine) as attacked:
        steps = dict.fromkeys(range(10**4), 0)

        def mark(plan):
            for new in plan.new_rows:
                if int.from_bytes(new.token_ids[:4], "little") == FIRST_CHAT_TOKEN:
                    hosts.worker.marked.add(new.row)
                    steps[new.row] = 0

        def fail_later(result: StepResult) -> StepResult:
            for row in result.rows:
                steps[row] = steps.get(row, 0) + 1
            errors = tuple(
                RowError(row, "this row cannot go on")
                for row in result.rows
                if row in hosts.worker.marked and steps[row] > after
            )
            return changed(result, errors=errors) if errors else result

        hosts.worker.on_launch = mark
        hosts.worker.on_result = fail_later
        whole, streamed = {}, {}
        for path in ROUTES:
            whole[path] = await attacked.client.post(path, json=BODIES[path])
            streamed[path] = await attacked.client.post(path, json=BODIES[path] | {"stream": True})
        body = BODIES["/v1/responses"] | {"background": True}
        queued = (await attacked.client.post("/v1/responses", json=body)).json()
        found = queued
        with anyio.fail_after(20):
            while found["status"] in ("queued", "in_progress"):
                found = (await attacked.client.get(f"/v1/responses/{queued['id']}")).json()
    assert [answer.status_code for answer in whole.values()] == [500, 500]
    assert whole["/v1/responses"].json()["error"]["code"] == "engine_request_failed"
    assert whole["/v1/messages"].json()["error"]["type"] == "api_error"
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    if after:
        events = events_of(streamed["/v1/responses"].text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["code"] == "engine_request_failed"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"
        last = events_of(streamed["/v1/messages"].text)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert hosts.worker.resets == 0


async def test_I3_a_background_response_cut_by_the_server_is_stored_as_failed(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        body = BODIES["/v1/responses"] | {"background": True}
        queued = (await attacked.client.post("/v1/responses", json=body)).json()
        mine = [one for one in attacked.served.host.in_flight if one.route == "/v1/responses" and not one.finished]
        (job,) = mine
        job.cancel_scope.cancel()
        await eventually(lambda: job not in attacked.served.host.in_flight)
        found = (await attacked.client.get(f"/v1/responses/{queued['id']}")).json()
    assert found["status"] == "failed"
    assert "shut down" in found["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "status"), [("20", "incomplete"), ("1", "failed")])
async def test_I2_I3_background_responses_get_the_drain_as_well(checkpoint, tmp_path, seconds, status):
    """Responses that end in time end as they should; the next server reports the others as failed or incomplete."""
    path = tmp_path / "responses.sqlite"
    flags = ("--shutdown-timeout", seconds, "--responses-store", str(path))
    body = BODIES["/v1/responses"] | {"background": True, "max_output_tokens": 300}
    async with ready_process(checkpoint, *flags, prefix=ODD, environment=PACE) as server:
        async with server.client() as client:
            made = (await client.post("/v1/responses", json=body)).json()
        server.signal(signal.SIGTERM)
        assert await server.exit_code(int(seconds) + 5) == 0
    kept = ResponseStore(ServerConfig(responses_store=str(path)))
    try:
        found = await kept.get("", made["id"])
    finally:
        await kept.close()
    assert found.status == status
    assert json.loads(found.body)["status"] == status
