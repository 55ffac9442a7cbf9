"""Requests that count tokens use up the limits of their key as requests that generate do."""

from contextlib import asynccontextmanager

import pytest

from troupellm.protocol.api.caller import Caller
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.quota import Quota
from troupellm.server.access.keys import read_keys
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.counting import charged, charged_anew
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
COUNTING = {
    "/tokenize": {"prompt": "x" * 40},
    "/detokenize": {"tokens": [7] * 40},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "Hi"},
}
KEYS = """
[[keys]]
name = "a"
key = "sk-a"
requests_per_minute = 100
tokens_per_minute = 6000
[[keys]]
name = "b"
key = "sk-b"
requests_per_minute = 1
[[keys]]
name = "two"
key = "sk-two"
requests_per_minute = 2
[[keys]]
name = "c"
key = "sk-c"
tokens_per_minute = 60
"""


@asynccontextmanager
async def keyed(tiny_engine, tmp_path, fronts):
    """A server whose keys have limits, and its engine, which is in another process if `fronts` says so."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    config = server_config(api_key_file=str(path))
    async with tiny_engine(tenants=read_keys(config).tenants) as engine:
        if not fronts:
            async with running_server(engine, config) as served:
                yield served
            return
        async with front_pair(engine) as pair, running_server(pair.remote, config) as served:
            yield served


@pytest.mark.parametrize("fronts", [False, True], ids=["one process", "a front"])
async def test_counted_tokens_are_taken_from_the_limits_of_the_key(tiny_engine, tmp_path, fronts):
    async with keyed(tiny_engine, tmp_path, fronts) as served, served.client(key="sk-a") as client:
        left = 6000
        for path, body in COUNTING.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert int(answer.headers["x-ratelimit-remaining-requests"]) < 100, path
            counted = answer.json()
            left -= counted.get("input_tokens") or 40
            wrong = await client.post("/tokenize", json={"prompt": "x" * 4000, "messages": HI})
            assert wrong.status_code == 400  # costs nothing
        body = {"prompt": [7], "max_tokens": 1, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert left - 2 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 6000


@pytest.mark.parametrize("fronts", [False, True], ids=["one process", "a front"])
@pytest.mark.parametrize("path", COUNTING)
async def test_a_key_without_requests_left_is_refused(tiny_engine, tmp_path, path, fronts):
    async with keyed(tiny_engine, tmp_path, fronts) as served, served.client(key="sk-b") as client:
        answers = [await client.post(path, json=COUNTING[path]) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "1 requests per minute" in answers[1].json()["error"]["message"]
    assert "retry-after" in answers[1].headers


async def test_a_key_without_tokens_left_is_refused(tiny_engine, tmp_path):
    async with keyed(tiny_engine, tmp_path, fronts=False) as served, served.client(key="sk-c") as client:
        answers = [await client.post("/detokenize", json={"tokens": [7] * 40}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


EDITED = {
    "messages": [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x" * 500}]},
        {"role": "user", "content": "More"},
    ],
    "context_management": {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 10},
                "keep": {"type": "tool_uses", "value": 0},
            }
        ]
    },
}


@pytest.mark.parametrize("fronts", [False, True], ids=["one process", "a front"])
async def test_a_message_with_edits_of_its_context_is_one_request_of_its_key(tiny_engine, tmp_path, fronts):
    message = EDITED | {"max_tokens": 1}
    async with keyed(tiny_engine, tmp_path, fronts) as served:
        async with served.client(key="sk-a") as client:
            answer = await client.post("/v1/messages", json=message)
            usage = answer.json()["usage"]
            assert answer.json()["context_management"]["applied_edits"]
            assert answer.headers["anthropic-ratelimit-requests-remaining"] == "99"
            after = await client.post("/tokenize", json={"prompt": ""})
            used = 6000 - int(after.headers["x-ratelimit-remaining-tokens"])
            assert used <= usage["input_tokens"] + usage["output_tokens"] + 1, "less of it fills up again"
        async with served.client(key="sk-two") as client:
            answers = [await client.post("/v1/messages", json=message) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


async def nothing(_: object = None) -> dict[str, str]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(("admitted", "requests"), [(False, 1), (True, 0)])
async def test_a_count_is_charged_unless_its_request_is_admitted_and_charged_itself(tiny_engine, admitted, requests):
    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
    async with tiny_engine(tenants=(TenantConfig(name="a", requests_per_minute=9, tokens_per_minute=900),)) as engine:
        exchange = Exchange(scope, nothing, nothing, request_id="a", write_timeout=0.0)
        exchange.caller = Caller("a", "a")
        async with charged(engine, exchange, 30) as charge:
            charge.tokens = 40
        with charged_anew(engine, exchange, charge):
            if admitted:
                exchange.quota = Quota(limit_requests=9)
        (account,) = engine.snapshot().tenants
        assert account.requests == requests


async def test_a_count_with_edits_is_one_request_of_its_key(tiny_engine, tmp_path):
    async with keyed(tiny_engine, tmp_path, fronts=False) as served, served.client(key="sk-b") as client:
        answers = [await client.post("/v1/messages/count_tokens", json=EDITED) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
