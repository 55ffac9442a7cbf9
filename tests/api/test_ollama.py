"""Ollama's API over a socket: forms of answers, names, limits and errors."""

import json
from typing import Any

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.config.tenant import TenantConfig
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import eventually, running_server, server_config

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "num_predict": 4, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": USER, "options": GREEDY}
PROMPT = {"model": "tiny", "prompt": "Hi", "options": GREEDY}


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_streams_and_whole_answers_say_the_same_as_the_chat_api(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        chat = {"model": "tiny", "messages": USER, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        wanted = (await client.post("/v1/chat/completions", json=chat)).json()
        lines = lines_of(await client.post("/api/chat", json=CHAT))
        whole = (await client.post("/api/chat", json=CHAT | {"stream": False})).json()
        of_prompt = (await client.post("/api/generate", json=PROMPT | {"stream": False})).json()
        piecewise = lines_of(await client.post("/api/generate", json=PROMPT))
    text = wanted["choices"][0]["message"]["content"]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"] == text
    assert "".join(line["response"] for line in piecewise) == of_prompt["response"] == text
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in (lines[-1], whole, of_prompt, piecewise[-1]):
        assert (last["done_reason"], last["eval_count"]) == ("length", 4)
        assert last["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
        assert last["total_duration"] >= last["eval_duration"] > 0


async def test_a_raw_prompt_is_a_completion_without_the_template(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        wanted = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        raw = lines_of(await client.post("/api/generate", json=PROMPT | {"raw": True}))
        described = PROMPT | {"raw": True, "stream": False, "logprobs": True, "top_logprobs": 2}
        whole = (await client.post("/api/generate", json=described)).json()
    assert "".join(line["response"] for line in raw) == whole["response"] == wanted
    assert [len(entry["top_logprobs"]) for entry in whole["logprobs"]] == [2] * 4


async def test_a_raw_prompt_without_a_limit_fills_the_context(tiny_engine):
    async with tiny_engine(max_model_len=64) as engine, running_server(engine) as served, served.client() as client:
        endless = {"temperature": 0, "ignore_eos": True}
        body = {"model": "tiny", "prompt": "Hi", "stream": False, "raw": True, "options": endless}
        answer = (await client.post("/api/generate", json=body)).json()
        beyond = CHAT | {"stream": False, "options": endless | {"num_predict": 1_000}}
        chat = (await client.post("/api/chat", json=beyond)).json()
    for seen in (answer, chat):
        assert seen["prompt_eval_count"] + seen["eval_count"] == 64
        assert seen["done_reason"] == "length"


async def test_empty_prompts_load_the_model_that_is_loaded(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        (loaded,) = lines_of(await client.post("/api/generate", json={"model": "tiny", "keep_alive": "5m"}))
        (unloaded,) = lines_of(await client.post("/api/chat", json={"model": "tiny", "messages": [], "keep_alive": 0}))
        whole = (await client.post("/api/generate", json={"model": "tiny", "prompt": "", "stream": False})).json()
        wrong = await client.post("/api/generate", json={"model": "tiny", "keep_alive": "soon"})
        after = await client.post("/api/chat", json=CHAT | {"stream": False})
    assert (loaded["done_reason"], loaded["response"], loaded["done"]) == ("load", "", True)
    assert (unloaded["done_reason"], unloaded["message"]["content"]) == ("unload", "")
    assert whole["done_reason"] == "load"
    assert (wrong.status_code, "keep_alive" in wrong.json()["error"]) == (400, True)
    assert after.json()["eval_count"] == 4


async def test_the_lists_name_the_model_and_its_abilities(tiny_engine):
    async with (
        tiny_engine(served_model_name=("tiny", "gpt:7b")) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        tags, loaded = (await client.get("/api/tags")).json(), (await client.get("/api/ps")).json()
        assert [model["name"] for model in tags["models"]] == ["tiny:latest", "gpt:7b"]
        assert [model["context_length"] for model in loaded["models"]] == [engine.limits.max_model_len] * 2
        digests = {model["digest"] for model in tags["models"]}
        assert {len(digest) for digest in digests} == {64}
        assert len(digests) == 2
        for name in ("tiny", "tiny:latest", "gpt:7b"):
            shown = (await client.post("/api/show", json={"name": name})).json()
            assert shown["capabilities"][0] == "completion"
            family = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{family}.context_length"] == engine.limits.max_model_len
            answer = await client.post("/api/chat", json=CHAT | {"model": name, "stream": False})
            assert answer.json()["model"] == name
        version = (await client.get("/api/version")).json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)
        pulled = lines_of(await client.post("/api/pull", json={"model": "tiny:latest"}))
        assert pulled == [{"status": "success"}]
        assert (await client.head("/api/tags")).status_code == 200


async def test_errors_are_one_text_and_name_the_fields_of_this_api(tiny_engine):
    cases = [
        ({"model": "nobody"}, 404, "nobody"),
        ({"options": {"temperature": 9}}, 400, "options.temperature"),
        ({"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty"),
        ({"options": {"num_predict": -3}}, 400, "options.num_predict"),
        ({"options": {"top_k": "x"}}, 400, "options.top_k"),
        ({"format": {"type": "nothing"}}, 400, "format"),
        ({"think": True}, 400, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["iVBORw0"]}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x" * 5_000}]}, 400, "context"),
    ]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for fields, status, text in cases:
            answer = await client.post("/api/chat", json=CHAT | fields)
            body = answer.json()
            assert (answer.status_code, list(body)) == (status, ["error"]), (fields, body)
            assert text in body["error"], (fields, body)
        for field in ("suffix", "template", "context"):
            refused = await client.post("/api/generate", json=PROMPT | {field: [5]})
            assert (refused.status_code, refused.json()["error"].startswith(field)) == (400, True)
        unknown = await client.post("/api/pull", json={"model": "llama3"})
        assert (unknown.status_code, "llama3" in unknown.json()["error"]) == (404, True)


async def test_skipped_options_are_named_in_a_header(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await client.post("/api/chat", json=CHAT | {"options": GREEDY | {"mirostat": 2, "num_gpu": 9}})
    assert answer.headers["x-troupellm-skipped"] == "option mirostat"


async def test_keys_and_their_limits_hold_here_too(tiny_engine):
    tenant = TenantConfig(name="key-1", requests_per_minute=2)
    config = server_config(api_key=("secret",))
    async with tiny_engine(tenants=(tenant,)) as engine, running_server(engine, config) as served:
        async with served.client() as client:
            answers = [await client.get("/api/tags"), await client.post("/api/chat", json=CHAT)]
            assert [(answer.status_code, type(answer.json()["error"])) for answer in answers] == [(401, str)] * 2
            assert (await client.get("/")).status_code == 200
        async with served.client(key="secret") as client:
            statuses = [(await client.post("/api/chat", json=CHAT)).status_code for _ in range(3)]
            refused = await client.post("/api/chat", json=CHAT)
    assert statuses == [200, 200, 429]
    assert isinstance(refused.json()["error"], str)
    assert "retry-after" in refused.headers


async def test_a_stream_that_fails_ends_with_a_line_that_says_so(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        endless = CHAT | {"options": {"ignore_eos": True, "num_predict": 1_500, "temperature": 0}}
        async with client.stream("POST", "/api/chat", json=endless) as answer:
            lines = answer.aiter_lines()
            seen = [json.loads(await anext(lines))]
            await engine.abort_all()
            seen += [json.loads(line) async for line in lines]
    assert list(seen[-1]) == ["error"]
    assert not any(line.get("done") for line in seen)


async def test_a_client_that_leaves_frees_its_blocks(tiny_engine):
    async with tiny_engine(max_model_len=2048) as engine, running_server(engine) as served, served.client() as client:
        endless = CHAT | {"options": {"ignore_eos": True, "num_predict": 1_500, "temperature": 0}}
        async with client.stream("POST", "/api/chat", json=endless) as answer:
            await anext(answer.aiter_lines())
        await eventually(lambda: engine.snapshot().scheduler.blocks_used == 0)


async def test_the_root_greets_ollamas_clients_and_programs_that_want_json(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        head, plain = await client.head("/"), await client.get("/")
        described = await client.get("/", headers={"accept": "application/json"})
    assert (head.status_code, plain.text) == (200, "Ollama is running")
    assert described.json() == {"name": "troupellm", "status": "ok"}


async def test_the_door_can_be_closed(tiny_engine):
    config = server_config(ollama=False)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        answers = [await client.get("/api/tags"), await client.post("/api/chat", json=CHAT)]
        root = await client.get("/")
    assert [answer.status_code for answer in answers] == [404, 404]
    assert root.json() == {"name": "troupellm", "status": "ok"}


async def test_the_built_in_model_calls_tools_fills_schemas_and_embeds():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": schema}}
    closed = schema | {"additionalProperties": False}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    greedy = {"temperature": 0, "num_predict": 200}
    async with (
        Engine(None, **SETTINGS | {"kv_cache_memory_bytes": 16 * 2**20}) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        body = {"model": "troupe-builtin", "messages": asked, "options": greedy, "stream": False}
        called = (await client.post("/api/chat", json=body | {"tools": [tool]})).json()["message"]
        (call,) = called["tool_calls"]
        answered = [*asked, called, {"role": "tool", "tool_name": "get_weather", "content": "Sunny, 21 C"}]
        told = (await client.post("/api/chat", json=body | {"messages": answered, "tools": [tool]})).json()
        formed = (await client.post("/api/chat", json=body | {"format": closed})).json()["message"]["content"]
        vectors = (await client.post("/api/embed", json={"model": "troupe-builtin", "input": ["a fox", "x"]})).json()
        older = (await client.post("/api/embeddings", json={"model": "troupe-builtin", "prompt": "a fox"})).json()
        none = (await client.post("/api/embed", json={"model": "troupe-builtin", "input": []})).json()
        shown = (await client.post("/api/show", json={"model": "troupe-builtin"})).json()
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", {"city": "Paris"})
    assert told["message"]["content"]
    assert list(json.loads(formed)) == ["city"]
    assert vectors["embeddings"][0] == pytest.approx(older["embedding"], abs=1e-6)
    assert [sum(number**2 for number in vector) for vector in vectors["embeddings"]] == pytest.approx([1, 1], abs=1e-4)
    assert none["embeddings"] == []
    assert set(shown["capabilities"]) >= {"completion", "embedding", "tools"}
