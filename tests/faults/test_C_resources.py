"""Rows C1 and C2 of the fault table: what does not fit."""

import pytest

from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.matrix import ROUTES

pytestmark = pytest.mark.anyio


async def test_C1_beyond_the_context_is_refused_with_both_numbers(tiny_engine):
    async with tiny_engine(max_model_len=256) as engine, under_attack(engine, canary_tokens=200) as attacked:
        for route, prompt in ROUTES.items():
            for stream in (False, True):
                body = {"model": "tiny", "stream": stream, **prompt}
                answer = await attacked.client.post(route, json=body | {"max_tokens": 256})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "256" in error["message"]
                assert answer.headers["x-should-retry"] == "false"
        long = await attacked.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 300})
        fits = await attacked.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": [5] * 250, "max_tokens": 6}
        )
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in long.json()["error"]["message"]
    assert "300" in long.json()["error"]["message"] or "316" in long.json()["error"]["message"]
    assert fits.status_code == 200


@pytest.mark.parametrize("limit", [2**31 - 1, 60])
async def test_C1_limits_that_are_upper_bounds_are_cut_at_the_context(tiny_engine, limit):
    """Of the responses and the messages API; a prompt that is too long by itself is refused there as well."""
    body = {"model": "tiny", "ignore_eos": True, "temperature": 0}
    hello = "x" * 20
    async with tiny_engine(max_model_len=64) as engine, under_attack(engine, canary_tokens=30) as attacked:
        ask = body | {"input": hello, "max_output_tokens": limit}
        whole = (await attacked.client.post("/v1/responses", json=ask)).json()
        streamed = (await attacked.client.post("/v1/responses", json=ask | {"stream": True})).text
        queued = await attacked.client.post("/v1/responses", json=ask | {"background": True, "stream": True})
        cut = await attacked.client.post("/v1/responses", json=ask | {"truncation": "auto"})
        ask = body | {"messages": [{"role": "user", "content": hello}], "max_tokens": limit}
        message = (await attacked.client.post("/v1/messages", json=ask)).json()
        long = await attacked.client.post("/v1/responses", json=body | {"input": "x" * 90, "max_output_tokens": limit})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["usage"]["total_tokens"], whole["max_output_tokens"]) == (64, limit)
    for text in (streamed, queued.text, cut.text):
        assert '"total_tokens":64' in text
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_C2_beyond_the_whole_pool_is_refused_and_the_queue_moves(tiny_engine):
    settings = {"num_gpu_blocks_override": 8, "block_size": 16, "kv_cache_memory_bytes": None}
    async with tiny_engine(**settings) as engine, under_attack(engine, canary_tokens=60) as attacked:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 100, "stream": stream}
            refused = await attacked.client.post("/v1/completions", json=body)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        behind = await attacked.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": [5] * 100, "max_tokens": 20, "ignore_eos": True}
        )
    assert behind.json()["usage"]["completion_tokens"] == 20
