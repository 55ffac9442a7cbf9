"""Adapters as model names: every route, the list of models, loading and unloading, keys, and API server processes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import troupellm
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.clients.batching import line, lines_of, over, sdk, serving_batches, started
from troupellm.tests.support.servers.front_pair import FrontPair, front_pair
from troupellm.tests.support.servers.processes import NO_SPARE, SMALL, ready_process
from troupellm.tests.support.servers.serving import events_of, eventually, running_server, server_config

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer root-key"}
ASK = {"prompt": "once", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LOADED = "Success: LoRA adapter 'new' added successfully."
UNLOADED = "Success: LoRA adapter 'new' removed successfully."


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    for seed, name in enumerate(("sql", "law", "sql-two")):
        write_tiny_adapter(tmp_path / "loras" / name, seed)
    return tmp_path / "loras"


@pytest.fixture
def engine_of(tiny_engine: Any, loras: Path) -> Callable[..., Any]:
    return partial(
        tiny_engine, enable_lora=True, max_loras=2, lora_modules=[f"sql={loras / 'sql'}"], lora_dir=[str(loras)]
    )


async def tokens(client: httpx.AsyncClient, model: str, **fields: Any) -> list[int]:
    response = await client.post("/v1/completions", json=ASK | {"model": model} | fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


async def test_an_adapter_is_a_model_in_every_route(engine_of: Any) -> None:
    async with engine_of() as engine, running_server(engine) as served, served.client() as client:
        chat = [{"role": "user", "content": "once"}]
        plain = {"temperature": 0, "max_tokens": 8}
        bodies = {
            "/v1/completions": {"prompt": "once"} | plain,
            "/v1/chat/completions": {"messages": chat} | plain,
            "/v1/responses": {"input": "once", "temperature": 0, "max_output_tokens": 8},
            "/v1/messages": {"messages": chat} | plain,
            "/v1/embeddings": {"input": "once"},
            "/pooling": {"input": "once"},
            "/v1/completions/render": {"prompt": "once"},
        }
        for path, body in bodies.items():
            answers = {}
            for model in ("tiny", "sql"):
                response = await client.post(path, json=body | {"model": model})
                assert response.status_code == 200, (path, response.text)
                answers[model] = response.json()
            if path.endswith("render"):
                assert answers["sql"][0]["model"] == "sql"
                continue
            assert answers["sql"]["model"] == "sql", path
            said = [{**answer, "id": 0, "model": 0, "created_at": 0, "created": 0} for answer in answers.values()]
            for answer in said:
                for item in answer.get("output", ()):
                    item["id"] = 0
            assert said[0] != said[1], path
            assert (await client.post(path, json=body | {"model": "nothing"})).status_code == 404, path
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert (await client.post(path, json=body | {"model": "sql"})).status_code == 200, path
            assert (await client.post(path, json=body | {"model": "nothing"})).status_code == 404, path
        counted = await client.post("/v1/messages/count_tokens", json={"model": "sql", "messages": chat})
        assert counted.status_code == 200
        streamed = await client.post("/v1/completions", json=ASK | {"model": "sql", "stream": True})
        events = events_of(streamed.text)
        assert {event["model"] for event in events} == {"sql"}
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == await tokens(client, "sql")


async def test_models_are_listed_with_their_parents(engine_of: Any) -> None:
    async with engine_of() as engine, running_server(engine) as served, served.client() as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert list(cards) == ["tiny", "sql"]
        assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("tiny", "sql")
        assert cards["tiny"]["parent"] is None
        assert (await client.get("/v1/models/law")).json()["parent"] == "tiny"  # found below lora_dir
        missing = await client.post("/v1/completions", json=ASK | {"model": "nothing"})
        error = missing.json()["error"]
        assert (missing.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "no model named nothing; served here: tiny, law, sql"


async def test_adapters_are_loaded_and_unloaded_as_clients_of_vllm_do(engine_of: Any, loras: Path) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with engine_of() as engine, running_server(engine, config) as served, served.client() as client:
        post = partial(client.post, headers=ADMIN)
        base, sql = await tokens(client, "tiny"), await tokens(client, "sql")
        for path in (str(loras / "law"), "law"):
            loaded = await post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": path})
            assert (loaded.status_code, loaded.text) == (200, LOADED)
            law = await tokens(client, "new")
            assert law not in (base, sql)
            again = await post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": path})
            assert again.status_code == 400
            assert "has already been loaded" in again.json()["error"]["message"]
            inplace = {"lora_name": "new", "lora_path": "sql", "load_inplace": True}
            assert (await post("/v1/load_lora_adapter", json=inplace)).status_code == 200
            assert await tokens(client, "new") == sql
            unloaded = await post("/v1/unload_lora_adapter", json={"lora_name": "new", "lora_int_id": 3})
            assert (unloaded.status_code, unloaded.text) == (200, UNLOADED)
            assert (await client.post("/v1/completions", json=ASK | {"model": "new"})).status_code == 404
            assert (await post("/v1/unload_lora_adapter", json={"lora_name": "new"})).status_code == 404
        assert await tokens(client, "tiny") == base
        assert (await client.post("/v1/load_lora_adapter", json={})).status_code == 401
    async with engine_of() as engine, running_server(engine) as served, served.client() as client:
        assert (await client.post("/v1/load_lora_adapter", json={})).status_code == 404


async def test_requests_that_run_keep_their_adapter(engine_of: Any) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with engine_of() as engine, running_server(engine, config) as served, served.client() as client:
        whole = await tokens(client, "sql", max_tokens=150)
        got: list[list[int]] = []

        async def stream() -> None:
            body = ASK | {"model": "sql", "max_tokens": 150, "stream": True}
            events = events_of((await client.post("/v1/completions", json=body)).text)
            got.append([token for event in events for token in event["choices"][0]["token_ids"]])

        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            await eventually(lambda: engine.snapshot().scheduler.running == 1)
            body = {"lora_name": "sql", "lora_path": "law", "load_inplace": True}
            assert (await client.post("/v1/load_lora_adapter", headers=ADMIN, json=body)).status_code == 200
            assert await tokens(client, "sql", max_tokens=150) != whole
            unload = {"lora_name": "sql"}
            assert (await client.post("/v1/unload_lora_adapter", headers=ADMIN, json=unload)).status_code == 200
        assert got == [whole]


async def test_keys_may_use_their_models_alone(engine_of: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nname = "a"\nkey = "key-a"\nmodels = ["sql*"]\n[[keys]]\nname = "b"\nkey = "key-b"\n'
        '[[keys]]\nname = "c"\nkey = "key-c"\nmodels = ["tiny"]\n'
    )
    tenants = ({"name": "a", "models": ["sql*"]}, {"name": "b"}, {"name": "c", "models": ["tiny"]})
    config = server_config(api_key_file=str(keys))
    async with engine_of(tenants=tenants) as engine, running_server(engine, config) as served:
        async with served.client(key="key-a") as client:
            assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["sql"]
            await tokens(client, "sql")
            await tokens(client, "sql-two")
            for model in ("tiny", "law", None):
                refused = await client.post("/v1/completions", json=ASK | {"model": model})
                assert refused.status_code == 404, model
                assert refused.json()["error"]["message"].endswith("served here: sql, sql-two")
        async with served.client(key="key-b") as client:
            await tokens(client, "tiny")
            await tokens(client, "law")
        async with served.client(key="key-c") as client:
            await tokens(client, "tiny")
            refused = await client.get("/v1/models/sql")
            assert refused.json()["error"]["message"] == "no model named sql; served here: tiny"


async def test_metrics_name_the_adapters_in_use(engine_of: Any) -> None:
    async with engine_of(max_loras=1) as engine, running_server(engine) as served, served.client() as client:
        async with anyio.create_task_group() as group:
            for model in ("sql", "law", "tiny"):
                group.start_soon(partial(tokens, client, model, max_tokens=200))
            await eventually(lambda: engine.snapshot().scheduler.adapters.waiting != ())
            adapters = engine.snapshot().scheduler.adapters
            assert (adapters.slots, adapters.slots_used) == (1, 1)
            assert {*adapters.running, *adapters.waiting} == {"sql", "law"}
            text = (await client.get("/metrics")).text
            (line,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
            assert 'max_lora="1"' in line
        assert 'running_lora_adapters=""' in (await client.get("/metrics")).text


async def test_lines_of_batches_name_adapters_that_their_key_may_use(engine_of: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "key-a"\nmodels = ["sql"]\n[[keys]]\nname = "b"\nkey = "key-b"\n')
    async with serving_batches(engine_of, tmp_path / "files", api_key_file=str(keys)) as served:
        async with served.client(key="key-b") as client:
            sql = await tokens(client, "sql")
        async with sdk(served, "key-a") as client:
            given = [line(number, **ASK | {"model": model}) for number, model in enumerate(("sql", "law", "tiny"))]
            done = await over(client, (await started(client, given)).id)
            (answered,) = await lines_of(client, done.output_file_id)
            refused = await lines_of(client, done.error_file_id)
    assert answered["response"]["body"]["choices"][0]["token_ids"] == sql
    assert [entry["response"]["status_code"] for entry in refused] == [404, 404]


async def test_an_api_process_finds_adapters_in_the_engine(engine_of: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        assert isinstance(pair, FrontPair)
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        here = [await engine.generate([5, 6], adapter=name, **options) for name in ("", "sql", "law")]
        there = [await pair.remote.generate([5, 6], adapter=name, **options) for name in ("", "sql", "law")]
        assert [answer.token_ids for answer in here] == [answer.token_ids for answer in there]
        with pytest.raises(troupellm.ModelNotFound, match="served here: tiny, law, sql"):
            await pair.remote.generate([5, 6], adapter="nothing", **options)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_api_server_process_takes_a_name_once_it_is_loaded(checkpoint: Path, loras: Path) -> None:
    flags = (*SMALL, *NO_SPARE, "--api-server-count", "2", "--enable-lora", "--lora-dir", str(loras))
    async with ready_process(checkpoint, *flags, "--admin-api-key", "root-key") as server:
        body = {"lora_name": "new", "lora_path": "law"}
        answers: list[int] = []

        async def load() -> None:
            async with server.client() as client:  # a connection of its own, to any of the processes
                loaded = await client.post("/v1/load_lora_adapter", headers=ADMIN, json=body)
                answers.append(loaded.status_code)
                assert loaded.text == LOADED or "has already been loaded" in loaded.text

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(load)
        assert sorted(answers) == [200, *[400] * 5]
        seen = set()
        for _ in range(12):
            async with server.client() as client:  # a connection of its own, to any of the processes
                seen.add(tuple(await tokens(client, "new")))
                assert "new" in [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert len(seen) == 1
