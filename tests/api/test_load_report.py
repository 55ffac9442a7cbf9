"""The engine's load in a header, for balancers that ask for it."""

import json
from typing import Any

import pytest

from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"


async def test_the_load_is_told_in_the_form_that_is_asked_for(tiny_engine: Any) -> None:
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for stream in (False, True):
                answer = await client.post(path, json=body | {"stream": stream}, headers={ASKED: "JSON"})
                kind, _, text = answer.headers[TOLD].partition(" ")
                assert kind == "JSON"
                numbers = json.loads(text)["named_metrics"]
                assert numbers.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
                assert 0 <= numbers["kv_cache_usage_perc"] <= 1
            answer = await client.post(path, json=body, headers={ASKED: "text"})
            assert answer.headers[TOLD].startswith("TEXT named_metrics.kv_cache_usage_perc=0")
            assert ", named_metrics.num_requests_waiting=0" in answer.headers[TOLD]
            assert TOLD not in (await client.post(path, json=body)).headers
            answer = await client.post(path, json=body, headers={ASKED: "BIN"})
            assert (answer.status_code, answer.headers["x-troupellm-skipped"]) == (200, "format BIN")
            assert TOLD not in answer.headers
