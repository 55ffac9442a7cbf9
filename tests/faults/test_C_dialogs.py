"""Rows C5, C6 and C10 of the fault table on the responses and messages APIs, and odd values all over their bodies."""

import copy
import sqlite3

import anyio
import msgspec
import pytest

from troupellm.server.base.errors import not_ready
from troupellm.server.responses import jobs
from troupellm.server.storage import database
from troupellm.tests.support.servers.canary import under_attack, under_many
from troupellm.tests.support.servers.serving import eventually, server_config

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = {"model": "tiny", "input": "Hi", "max_output_tokens": 1}
ODD = (
    None,
    True,
    -1,
    2**63,
    1.5,
    1e308,
    "",
    "\x00",
    "x" * 600,
    [],
    [[]],
    {},
    {"type": "odd"},
    [{"type": "odd"}],
    ["x"],
)
BODIES = {
    RESPONSES: {
        "model": "tiny",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "namespace": "mcp__x", "name": "put", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "instructions": "Be kind.",
        "max_output_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [
            {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False},
            {"type": "namespace", "name": "mcp__x", "description": "y", "tools": [{"type": "function", "name": "put"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]},
        "truncation": "auto",
        "store": False,
        "previous_response_id": None,
        "background": None,
        "user": "me",
    },
    MESSAGES: {
        "model": "tiny",
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t", "name": "get", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}],
            },
        ],
        "tools": [{"name": "get", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["\n"],
        "metadata": {"user_id": "me"},
        "temperature": 0.5,
        "top_k": 4,
        "allowed_token_ids": None,
        "output_config": {"effort": "low"},
    },
}


def places(value, path=()):
    """The way to everything in a body."""
    if path:
        yield path
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, name))


def changed(body, path, value):
    body = copy.deepcopy(body)
    at = body
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return body


@pytest.mark.parametrize("share", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", BODIES)
async def test_an_odd_value_anywhere_is_taken_or_refused(tiny_engine, route, share):
    """One case of 17, or all of them."""
    cases = [(path, value) for path in places(BODIES[route]) for value in ODD][::share]
    wrong = []
    async with tiny_engine() as engine, under_many(engine) as attacked:
        assert (await attacked.client.post(route, json=BODIES[route] | {"max_tokens": 1025})).status_code in (200, 400)
        for path, value in cases:
            # The answer's length is no part of this: the limits are put back where they were not the change.
            body = changed(BODIES[route], path, value)
            if route == MESSAGES and path[0] not in ("max_tokens", "thinking"):
                body |= {"max_tokens": 1, "thinking": None}
            response = await attacked.client.post(route, json=body)
            error = response.json().get("error")
            shaped = error is None if response.status_code == 200 else isinstance(error, dict) and error["message"]
            if response.status_code not in (200, 400, 404) or not shaped:
                wrong.append((path, value, response.status_code, response.text[:200]))
    assert not wrong, "\n".join(map(str, wrong[:20]))


async def test_C5_responses_that_are_kept_are_bounded(tiny_engine):
    config = server_config(responses_store_entries=20, responses_store_bytes=40_000)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        for _ in range(60):
            assert (await attacked.client.post(RESPONSES, json=HI)).status_code == 200
        text = (await attacked.client.get("/metrics")).text
    counts = {
        line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("troupellm_resp")
    }
    assert 0 < counts["troupellm_responses_stored"] <= 20
    assert 0 < counts["troupellm_responses_stored_bytes"] <= 40_000
    evicted = sum(number for name, number in counts.items() if name.startswith("troupellm_responses_evicted_total"))
    assert counts["troupellm_responses_stored"] + evicted == 60


async def test_C6_short_requests_do_not_bring_in_more_than_a_body_may_have(tiny_engine):
    """Items that are referred to again and again, and chains of responses too large to be read."""
    calls = [{"type": "web_search_call", "id": f"ws_{number}", "junk": [[1]] * 900} for number in range(100)]
    calls.append({"type": "message", "role": "user", "content": "x"})
    async with tiny_engine() as engine, under_attack(engine, server_config(max_body_bytes=500_000)) as attacked:
        input_items = [{"type": "message", "role": "assistant", "content": "x" * 2_000, "id": None}, *calls[-1:]]
        made = (await attacked.client.post(RESPONSES, json=HI | {"input": input_items})).json()
        reference = {"id": f"in_{made['id'].removeprefix('resp_')}0000"}
        many = await attacked.client.post(RESPONSES, json=HI | {"input": [reference] * 250})
        chained = (await attacked.client.post(RESPONSES, json=HI | {"input": calls})).json()
        listed = (await attacked.client.get(f"{RESPONSES}/{chained['id']}/input_items?order=asc")).json()
        again = await attacked.client.post(RESPONSES, json=HI | {"previous_response_id": chained["id"]})
        large = HI | {"input": "x" * 500}
        name, answer = None, None
        for _ in range(3):
            answer = await attacked.client.post(RESPONSES, json=large | {"previous_response_id": name})
            name = answer.json()["id"]
        attacked.served.host.config = msgspec.structs.replace(attacked.served.host.config, max_body_bytes=3_000)
        full = await attacked.client.post(RESPONSES, json=HI | {"previous_response_id": name})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "input")
    assert "max-body-bytes" in many.json()["error"]["message"]
    assert listed["data"][0] == {"type": "web_search_call", "id": "ws_0"}
    assert again.status_code == 200
    assert (full.status_code, full.json()["error"]["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize("kind", ["input", "messages"])
async def test_C6_many_small_items_leave_the_loop_free(tiny_engine, kind):
    items = [{"role": "user", "content": "x"}] * 100_000
    route, body = (RESPONSES, HI) if kind == "input" else (MESSAGES, {"model": "tiny", "max_tokens": 1})
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for _ in range(2):
            response = await attacked.client.post(route, json=body | {kind: items})
            assert response.status_code == 400
            assert kind in response.json()["error"]["message"]


async def test_C10_a_store_that_cannot_write_costs_the_answer_nothing(tiny_engine, tmp_path, monkeypatch):
    config = server_config(responses_store=str(tmp_path / "responses.sqlite"))
    whole = database.open_database

    opened = []

    def noted(schema, path):
        opened.append(whole(schema, path))
        return opened[-1]

    monkeypatch.setattr(database, "open_database", noted)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        opened[0].execute("PRAGMA query_only = ON")
        large = HI | {"input": "x" * 3000}
        made = await attacked.client.post(RESPONSES, json=large)
        streamed = await attacked.client.post(RESPONSES, json=large | {"stream": True})
        queued = await attacked.client.post(RESPONSES, json=large | {"background": True})
        found = await attacked.client.get(f"{RESPONSES}/{made.json()['id']}")
        metrics = (await attacked.client.get("/metrics")).text
    assert (made.status_code, made.json()["store"], made.json()["status"]) == (200, False, "incomplete")
    assert '"store":false' in streamed.text.rpartition("data: ")[2]
    assert (queued.status_code, queued.headers["x-should-retry"]) == (503, "true")
    assert found.status_code == 503
    (errors,) = [line for line in metrics.splitlines() if line.startswith("troupellm_responses_store_errors_total")]
    assert float(errors.split()[1]) >= 4


async def test_C10_a_file_that_somebody_holds_is_told_and_not_waited_for_by_others(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    path = str(tmp_path / "responses.sqlite")
    async with tiny_engine() as engine, under_attack(engine, server_config(responses_store=path)) as attacked:
        made = (await attacked.client.post(RESPONSES, json=HI)).json()
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        with anyio.fail_after(20):
            busy = await attacked.client.get(f"{RESPONSES}/{made['id']}")
        holder.close()
        free = await attacked.client.get(f"{RESPONSES}/{made['id']}")
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert int(busy.headers["retry-after"]) >= 1
    assert free.json() == made


async def test_C10_a_file_that_somebody_holds_for_a_while_ends_no_background_response(
    tiny_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "RENEW_SECONDS", 0.02)
    path = str(tmp_path / "responses.sqlite")
    body = HI | {"max_output_tokens": 200, "ignore_eos": True, "background": True, "stream": True}
    async with tiny_engine() as engine, under_attack(engine, server_config(responses_store=path)) as attacked:
        host = attacked.served.host
        async with attacked.client.stream("POST", RESPONSES, json=body) as response:
            events = response.aiter_text()
            first = await anext(events)
            holder = sqlite3.connect(path, isolation_level=None)
            holder.execute("BEGIN EXCLUSIVE")
            await eventually(lambda: host.responses.errors > 3)
            holder.close()
        name = "resp_" + first.partition('"id":"resp_')[2][:32]
        await eventually(lambda: not host.background.running)
        found = (await attacked.client.get(f"{RESPONSES}/{name}")).json()
        whole = (await attacked.client.get(f"{RESPONSES}/{name}?stream=true")).text
    assert (found["status"], found["usage"]["output_tokens"], found["error"]) == ("incomplete", 200, None)
    assert "response.incomplete" in whole


async def test_C10_a_background_response_that_cannot_be_written_says_why_it_has_failed(tiny_engine, monkeypatch):
    monkeypatch.setattr(jobs, "LEASE_SECONDS", 0.0)
    async with tiny_engine() as engine, under_attack(engine) as attacked:

        async def full(*_):
            raise not_ready("the disk is full", code="server_is_overloaded")

        monkeypatch.setattr(attacked.served.host.responses, "log", full)
        body = HI | {"background": True, "stream": True}
        told = (await attacked.client.post(RESPONSES, json=body)).text
        assert told
        (kept,) = attacked.served.host.responses._database.execute("SELECT id FROM responses").fetchall()
        found = (await attacked.client.get(f"{RESPONSES}/{kept[0]}")).json()
    assert (found["status"], found["error"]["message"]) == ("failed", "the disk is full")


async def test_C10_a_stream_that_cannot_be_read_on_ends_in_this_apis_own_way(tiny_engine, monkeypatch):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        body = HI | {"background": True, "stream": True, "max_output_tokens": 100, "ignore_eos": True}
        store, asked = attacked.served.host.responses, []
        logged = store.logged

        async def failing(*given):
            asked.append(given)
            if len(asked) > 3:
                raise not_ready("the disk is gone", code="server_is_overloaded")
            return await logged(*given)

        monkeypatch.setattr(store, "logged", failing)
        text = (await attacked.client.post(RESPONSES, json=body)).text
    *before, last = [block.split("\n") for block in text.split("\n\n")[:-1]]
    event = msgspec.json.decode(last[1].removeprefix("data: "))
    assert last[0] == "event: error"
    assert event["message"] == "the disk is gone"
    assert (event["type"], event["code"], event["sequence_number"]) == ("error", "server_is_overloaded", len(before))


async def test_C5_a_response_larger_than_the_store_is_refused_for_good(tiny_engine):
    config = server_config(responses_store_bytes=2_000)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        refused = await attacked.client.post(RESPONSES, json=HI | {"input": "x" * 2_500, "background": True})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
    assert refused.json()["error"]["param"] == "background"
