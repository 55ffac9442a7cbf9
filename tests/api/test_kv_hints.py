"""Sessions and leases over HTTP: named by headers and fields, kept by API key, prefetched and dropped by routes."""

import pytest

from troupellm.tests.support.servers.serving import eventually, running_server, server_config

pytestmark = pytest.mark.anyio

RULES = " ".join(f"Rule {number}: keep the style." for number in range(20))
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))


def leases(engine):
    return engine.snapshot().scheduler.leases


def body(**fields):
    return {"model": "troupe-builtin", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi."}]} | fields


async def test_a_marked_system_prompt_is_leased(builtin_engine):
    async with (
        builtin_engine(kv_cache_memory_bytes=8 * 2**20) as engine,
        running_server(engine, server_config()) as served,
        served.client() as client,
    ):
        system = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        response = await client.post("/v1/messages", json=body(system=system))
        assert response.status_code == 200, response.text
        prompt = response.json()["usage"]["input_tokens"]
        await eventually(lambda: leases(engine).leased_blocks > 0)
        leased = leases(engine).leased_blocks
        assert leased <= prompt // engine.config.cache.block_size
        response = await client.post(
            "/v1/chat/completions",
            json=body(prompt_cache_retention="24h", messages=[{"role": "user", "content": RULES}]),
        )
        assert response.status_code == 200, response.text
        await eventually(lambda: leases(engine).leased_blocks > leased)
        assert "troupellm_kv_leased_blocks{" in (await client.get("/metrics")).text


async def test_a_session_is_prefetched_and_dropped_by_its_own_key_alone(builtin_engine):
    config = server_config(api_key=("one", "two"))
    async with (
        builtin_engine(kv_cache_memory_bytes=8 * 2**20) as engine,
        running_server(engine, config) as served,
        served.client() as client,
    ):
        asked = body(session_id="s", messages=[{"role": "user", "content": RULES}])
        response = await client.post("/v1/chat/completions", json=asked, headers=ONE)
        assert response.status_code == 200, response.text
        for method, path in (("POST", "/v1/kv/sessions/s/prefetch"), ("DELETE", "/v1/kv/sessions/s")):
            refused = await client.request(method, path, headers=TWO)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
        found = await client.post("/v1/kv/sessions/s/prefetch", headers=ONE)
        assert found.status_code == 200, found.text
        await eventually(lambda: leases(engine).leased_blocks == found.json()["present_blocks"] > 0)
        dropped = await client.delete("/v1/kv/sessions/s", headers=ONE)
        assert dropped.json()["evicted_first"] == found.json()["present_blocks"]
        await eventually(lambda: leases(engine).leased_blocks == 0)
        assert (await client.delete("/v1/kv/sessions/s", headers=ONE)).status_code == 404


async def test_a_turn_that_ends_in_calls_is_kept_for_its_results(builtin_engine):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    async with (
        builtin_engine(kv_cache_memory_bytes=8 * 2**20) as engine,
        running_server(engine, server_config()) as served,
        served.client() as client,
    ):
        asked = body(max_tokens=200, temperature=0, tools=[tool], tool_choice="required", prompt_cache_key="s")
        for stream in (False, True):
            response = await client.post("/v1/chat/completions", json=asked | {"stream": stream})
            assert response.status_code == 200, response.text
            assert '"finish_reason":"tool_calls"' in response.text
            await eventually(lambda: leases(engine).leased_blocks > 0)
            assert await engine.drop_session("s")


async def test_marks_that_cannot_be_kept_are_refused(builtin_engine):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    async with (
        builtin_engine(kv_cache_memory_bytes=8 * 2**20) as engine,
        running_server(engine, server_config()) as served,
        served.client() as client,
    ):
        for path in ("/v1/messages", "/v1/chat/completions"):
            response = await client.post(path, json=body(messages=[{"role": "user", "content": [part]}]))
            assert response.status_code == 400
            assert "must be 5m or 1h" in response.json()["error"]["message"]
