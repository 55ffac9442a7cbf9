"""The texts and statuses that agents look for, matched with the patterns of their own source."""

import json
import re
from typing import Any

import httpx
import pytest

from troupellm.actors.admission.quotas import Quotas
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.errors import ContextLengthExceeded, EngineOverloaded, RateLimited
from troupellm.protocol.quota import Quota
from troupellm.server.base.errors import ErrorAnswer, answer
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

CLAUDE_TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
CLAUDE_SUM = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
OPENCODE = re.compile(r"maximum context length is \d+ tokens", re.IGNORECASE)
CLINE = re.compile(r"\bcontext\s*(?:length|window)\b", re.IGNORECASE)
LITELLM = "this model's maximum context length is"
CODEX_WAIT = re.compile(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)")

LONG = "x" * 600
CHAT = [{"role": "user", "content": LONG}]
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
}


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def sees_a_long_conversation(message: str) -> bool:
    matched = bool(OPENCODE.search(message)), bool(CLINE.search(message)), LITELLM in message.lower()
    return all(matched)


@pytest.mark.parametrize("limits", [{"max_model_len": 64}, {"kv_cache_memory_bytes": 2**16}], ids=["context", "cache"])
async def test_a_conversation_that_is_too_long_is_recognized_on_every_api(tiny_engine, limits):
    async with tiny_engine(**limits) as engine, running_server(engine) as served, served.client() as client:
        for path, body in TOO_LONG.items():
            whole = await client.post(path, json=body)
            assert whole.status_code == 400, (path, whole.text)
            assert whole.headers["x-should-retry"] == "false"
            assert sees_a_long_conversation(message_of(whole)), whole.text
            if path == "/v1/messages":
                found = CLAUDE_TOO_LONG.search(message_of(whole))
                assert found is not None
                assert int(found[1]) > int(found[2]) > 0
            else:
                assert whole.json()["error"]["code"] == "context_length_exceeded"
            streamed = await client.post(path, json=body | {"stream": True})
            assert streamed.status_code == (200 if path == "/v1/responses" else 400), path


async def test_codex_finds_a_failed_response_in_the_stream(tiny_engine):
    async with tiny_engine(max_model_len=64) as engine, running_server(engine) as served, served.client() as client:
        response = await client.post("/v1/responses", json={"input": LONG, "stream": True, "store": True})
        kept = await client.get(f"/v1/responses/{failed_response(response.text)['id']}")
    assert response.headers["content-type"].startswith("text/event-stream")
    failed = failed_response(response.text)
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "context_length_exceeded"
    assert sees_a_long_conversation(failed["error"]["message"])
    assert failed["store"] is False
    assert kept.status_code == 404


def failed_response(text: str) -> dict[str, Any]:
    events = [block.partition("\ndata: ") for block in text.split("\n\n") if block]
    assert [name for name, _, _ in events] == [
        f"event: {name}" for name in ("response.created", "response.in_progress", "error", "response.failed")
    ]
    return dict(json.loads(events[-1][2])["response"])


async def test_a_bad_value_of_a_streamed_response_is_a_status(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        response = await client.post("/v1/responses", json={"input": "Hi", "stream": True, "temperature": 9})
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ContextLengthExceeded("m", limit=64, got=90, answer_tokens=40),
            "input length and `max_tokens` exceed context limit: 50 + 40 > 64",
        ),
        (ContextLengthExceeded("m", limit=64, got=90), "prompt is too long: 90 tokens > 64 maximum"),
        (ContextLengthExceeded("m", limit=64, got=64), "prompt is too long: 64 tokens > 63 maximum"),
        (ContextLengthExceeded("m", limit=1, got=1), "prompt is too long: 2 tokens > 1 maximum"),
    ],
)
def test_claude_code_reads_how_much_is_too_much(error, sentence):
    message = json.loads(answer(error, shape="anthropic").body)["error"]["message"]
    assert message.startswith(sentence)
    assert CLAUDE_SUM.search(message) or CLAUDE_TOO_LONG.search(message)


def test_each_api_has_its_status_of_a_full_waiting_room():
    full = EngineOverloaded("full", retry_after=2.0)
    seen = {shape: answer(full, shape=shape) for shape in ("openai", "responses", "anthropic")}
    assert {shape: told.status for shape, told in seen.items()} == {"openai": 429, "responses": 503, "anthropic": 529}
    assert json.loads(seen["responses"].body)["error"]["code"] == "server_is_overloaded"
    assert json.loads(seen["anthropic"].body)["error"]["type"] == "overloaded_error"
    for told in seen.values():
        headers = dict(told.headers)
        assert headers[b"x-should-retry"] == b"true"
        assert 2000 <= int(headers[b"retry-after-ms"]) < 3000
        assert 2 <= int(headers[b"retry-after"]) <= 3
    fixed = [answer(full, shape=shape, overload_status=503).status for shape in ("openai", "responses", "anthropic")]
    assert fixed == [503] * 3


class Clock:
    def now(self) -> float:
        return 100.0

    def monotonic(self) -> float:
        return 100.0


def limited(**limits: int) -> RateLimited:
    quotas = Quotas([TenantConfig(name="a", **limits)], Clock())
    quotas.take("a", requests=1, sequences=1, tokens=50)
    with pytest.raises(RateLimited) as caught:
        quotas.check("a", requests=1, sequences=1, tokens=50)
    return caught.value


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [({"requests_per_minute": 1}, 60.0), ({"tokens_per_minute": 50}, 60.0), ({"max_concurrency": 1}, 1.0)],
)
@pytest.mark.parametrize("shape", ["openai", "responses", "anthropic"])
def test_a_key_at_its_limit_is_told_when_to_try_again(limits, seconds, shape):
    told = answer(limited(**limits), shape=shape)
    found = CODEX_WAIT.search(json.loads(told.body)["error"]["message"])
    assert told.status == 429
    assert found is not None
    assert (float(found[1]), found[2]) == (seconds, "s")


def headers_of(told: ErrorAnswer) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in told.headers}


def test_limits_of_a_key_stand_under_anthropics_names_on_its_routes():
    quota = Quota(limit_requests=5, remaining_requests=0, reset_requests=1.2, limit_tokens=9, remaining_tokens=4)
    error = RateLimited("limit", retry_after=1.2, quota=quota)
    theirs, ours = (headers_of(answer(error, shape=shape)) for shape in ("anthropic", "openai"))
    for kind, limit, remaining in (("requests", "5", "0"), ("tokens", "9", "4")):
        assert theirs[f"anthropic-ratelimit-{kind}-limit"] == limit
        assert theirs[f"anthropic-ratelimit-{kind}-remaining"] == remaining
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", theirs[f"anthropic-ratelimit-{kind}-reset"])
        assert theirs[f"x-ratelimit-limit-{kind}"] == ours[f"x-ratelimit-limit-{kind}"] == limit
    assert not any(name.startswith("anthropic") for name in ours)


async def test_an_answer_of_the_messages_api_tells_what_is_left(tiny_engine, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "secret"\nrequests_per_minute = 5\n')
    tenants = (TenantConfig(name="a", requests_per_minute=5),)
    config = server_config(api_key_file=str(keys))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with (
        tiny_engine(tenants=tenants) as engine,
        running_server(engine, config) as served,
        served.client(key="secret") as client,
    ):
        answered = await client.post("/v1/messages", json=body)
    assert answered.status_code == 200, answered.text
    assert answered.headers["anthropic-ratelimit-requests-remaining"] == "4"


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, " cause=context_length_exceeded param=messages"),
        ("/v1/responses", {"input": LONG, "stream": True}, " cause=context_length_exceeded param=input"),
        ("/v1/completions", {"prompt": "Hi", "temperature": 9}, " cause=decimal_above_max_value param=temperature"),
        ("/nowhere", {}, " cause=unknown_url"),
        ("/v1/completions", {"prompt": "Hi", "logit_bias": {"\nforged": 1}}, " cause=invalid_type param=logit_bias"),
    ],
)
async def test_the_access_line_of_a_refusal_says_cause_and_field(tiny_engine, caplog, path, body, end):
    caplog.set_level("INFO", "troupellm.access")
    async with tiny_engine(max_model_len=64) as engine, running_server(engine) as served, served.client() as client:
        await client.post(path, json=body)
        await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    refused, served_line = [record.getMessage() for record in caplog.records if record.name == "troupellm.access"]
    assert refused.endswith(end), refused
    assert " cause=" not in served_line
