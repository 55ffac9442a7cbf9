"""openai-python against the real server: embeddings in every form, and what other models do under the same roof."""

import base64
import json
import re
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from troupellm import Engine
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.clients.fuzzing import fuzz
from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.processes import serving_process
from troupellm.tests.support.servers.serving import Served, running_server, server_config

pytestmark = pytest.mark.anyio

FUZZED = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/completions",
)
TEXTS = ["a fox", "the quick brown fox", "x"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "minilm"
    tiny_encoder.write_encoder(folder, tiny_encoder.bert, pooling="mean_tokens")
    return folder


@asynccontextmanager
async def sdk(model: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served, Engine]]:
    async with (
        Engine(model, device="cpu", num_threads=1) as engine,
        running_server(engine, server_config(api_key=("secret",))) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="secret",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        ) as client,
    ):
        yield client, served, engine


async def test_embeddings_in_every_form(encoder: Path) -> None:
    async with sdk(encoder) as (client, _, engine):
        local = await engine.embed(TEXTS)
        create = client.embeddings.create
        # The client asks for base64 by itself and decodes it; asked for floats it gets floats.
        plain = await create(model="minilm", input=TEXTS)
        floats = await create(model="minilm", input=TEXTS, encoding_format="float", user="somebody")
        coded = await create(model="minilm", input=TEXTS, encoding_format="base64")
        for answer in (plain, floats):
            assert [item.index for item in answer.data] == [0, 1, 2]
            for item, vector in zip(answer.data, local, strict=True):
                np.testing.assert_allclose(item.embedding, vector, atol=1e-6)
        for item, vector in zip(coded.data, local, strict=True):
            assert array("f", base64.b64decode(item.embedding)).tolist() == pytest.approx(vector, abs=1e-6)
        ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
        assert (plain.object, plain.model, plain.data[0].object) == ("list", "minilm", "embedding")
        for given, expected in ((TEXTS[0], local[:1]), (ids[1], local[1:2]), (ids, local)):
            answer = await create(model="minilm", input=given)
            assert len(answer.data) == len(expected)
            for item, vector in zip(answer.data, expected, strict=True):
                np.testing.assert_allclose(item.embedding, vector, atol=1e-5)
        cut = await create(model="minilm", input="x " * 300, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == tiny_encoder.POSITIONS
        assert cut.usage.model_dump()["prompt_tokens_details"]["truncated"] is True
        assert "truncated" not in plain.usage.model_dump()["prompt_tokens_details"]


async def test_embeddings_as_coheres_clients_ask_for_them(encoder: Path) -> None:
    async with sdk(encoder) as (_, served, engine), served.client(key="secret") as client:
        local = await engine.embed(TEXTS)
        body = {"model": "minilm", "texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "base64"]}
        answer = await client.post("/v2/embed", json=body)
        plain = await client.post("/v2/embed", json={"texts": ["x " * 300], "truncate": "END"})
        refused = [
            await client.post("/v2/embed", json=fields)
            for fields in (
                {"texts": []},
                {"texts": ["a"], "embedding_types": ["int8"]},
                {"texts": ["a"], "images": ["data:"]},
                {"texts": ["a"], "output_dimension": 8},
                {"texts": ["a", "x " * 300]},
            )
        ]
    told = answer.json()
    np.testing.assert_allclose(told["embeddings"]["float"], local, atol=1e-6)
    for coded, vector in zip(told["embeddings"]["base64"], local, strict=True):
        assert array("f", base64.b64decode(coded)).tolist() == pytest.approx(vector, abs=1e-6)
    assert told["texts"] == TEXTS
    assert told["meta"]["billed_units"]["input_tokens"] > 0
    assert list(plain.json()["embeddings"]) == ["float"]
    assert [(other.status_code, other.json()["error"]["param"]) for other in refused] == [
        (400, "texts"),
        (400, "embedding_types"),
        (400, "images"),
        (400, "output_dimension"),
        (400, "texts[1]"),
    ]


async def test_refusals_and_the_list_of_models(encoder: Path) -> None:
    async with sdk(encoder) as (client, served, _):
        for fields, param in (
            ({"input": "a", "dimensions": 8}, "dimensions"),
            ({"input": "x " * 300}, "input"),
            ({"input": []}, "input"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="minilm", **fields)
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")
        messages: Any = [{"role": "user", "content": "a"}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="minilm", prompt="a", stream=stream)
            assert (caught.value.param, caught.value.code) == ("model", "unsupported_task")
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="minilm", messages=messages, stream=stream)
        models = await client.models.list()
        assert models.data[0].model_extra is not None
        assert models.data[0].model_extra["tasks"] == ["embed"]
        async with served.client() as stranger:
            for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v2/rerank"):
                assert (await stranger.post(path, json={})).status_code == 401


async def test_matryoshka_embeddings_are_as_long_as_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    tiny_encoder.write_encoder(folder, tiny_encoder.bert, pooling="mean_tokens")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 48]}))
    async with sdk(folder) as (client, served, _):
        create = client.embeddings.create
        whole = await create(model="minilm", input=TEXTS, encoding_format="float")
        for size, encoding in ((16, "float"), (16, "base64"), (48, "float")):
            given: Any = {"encoding_format": encoding, "dimensions": size}
            short = await create(model="minilm", input=TEXTS, **given)
            for item, long in zip(short.data, whole.data, strict=True):
                coded: Any = item.embedding
                vector = coded if encoding == "float" else array("f", base64.b64decode(coded)).tolist()
                part = np.array(long.embedding[:size])
                np.testing.assert_allclose(vector, part / np.linalg.norm(part), atol=1e-5)
        for wrong in (0, 8, 49):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model="minilm", input="a", dimensions=wrong)
            assert caught.value.param == "dimensions"
        body = {"model": "minilm", "input": "a fox", "dimensions": 16}
        async with served.client(key="secret") as plain:
            pooled = (await plain.post("/pooling", json=body)).json()["data"][0]["data"]
        assert len(pooled) == 16


async def test_a_large_answer_comes_in_pieces_and_whole(encoder: Path) -> None:
    async with sdk(encoder) as (client, _, engine):
        texts = [f"{number} fox" for number in range(700)]
        answer = await client.embeddings.create(model="minilm", input=texts, encoding_format="float")
        assert [item.index for item in answer.data] == list(range(700))
        (last,) = await engine.embed(texts[-1])
        np.testing.assert_allclose(answer.data[-1].embedding, last, atol=1e-5)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="minilm", input=["a"] * 2049)
        assert caught.value.param == "input"


async def test_scores_ranks_and_classes(tmp_path: Path, encoder: Path) -> None:
    tiny_encoder.write_encoder(tmp_path / "cross", lambda: tiny_encoder.bert(1))
    key = {"authorization": "Bearer secret"}
    for folder, name in ((encoder, "minilm"), (tmp_path / "cross", "cross")):
        async with sdk(folder) as (_, served, engine), served.client() as client:
            client.headers.update(key)
            local = await engine.score("a fox", TEXTS)
            body = {"model": name, "text_1": "a fox", "text_2": TEXTS}
            for path in ("/v1/score", "/score"):
                scores = (await client.post(path, json=body)).json()
                assert [item["score"] for item in scores["data"]] == pytest.approx(local, abs=1e-5)
                assert scores["usage"]["prompt_tokens"] > 0
            ranked = sorted(range(3), key=lambda index: -local[index])
            for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
                body = {"model": name, "query": "a fox", "documents": [*TEXTS[:2], {"text": TEXTS[2]}], "top_n": 2}
                found = (await client.post(path, json=body)).json()["results"]
                assert [item["index"] for item in found] == ranked[:2]
                assert [item["document"]["text"] for item in found] == [TEXTS[index] for index in ranked[:2]]
                assert found[0]["relevance_score"] == pytest.approx(local[ranked[0]], abs=1e-5)
            body = {"model": name, "query": "a fox", "documents": ["a", "b", "x " * 300]}
            assert (await client.post("/rerank", json=body)).json()["error"]["param"] == "documents[2]"
            body |= {"truncate_prompt_tokens": -1}
            assert (await client.post("/rerank", json=body)).json()["usage"]["truncated"] is True
            body = {"model": name, "truncate_prompt_tokens": 5, "text_1": "x " * 300, "text_2": TEXTS}
            usage = (await client.post("/score", json=body)).json()["usage"]
            assert usage["prompt_tokens_details"]["truncated"] is True
    tiny_encoder.write_encoder(tmp_path / "classes", lambda: tiny_encoder.distilbert(3))
    async with sdk(tmp_path / "classes") as (_, served, engine), served.client() as client:
        client.headers.update(key)
        local = await engine.classify(TEXTS)
        answer = (await client.post("/classify", json={"model": "classes", "input": TEXTS})).json()
        for item, probs in zip(answer["data"], local, strict=True):
            assert item["probs"] == pytest.approx(probs, abs=1e-5)
            assert (item["num_classes"], item["label"]) == (3, f"LABEL_{int(np.argmax(probs))}")
        pooled = (await client.post("/pooling", json={"model": "classes", "input": "a fox"})).json()
        assert pooled["data"][0]["data"] == pytest.approx(local[0], abs=1e-5)


@pytest.mark.slow
async def test_a_server_with_fronts_and_a_worker_process(encoder: Path) -> None:
    async with (
        Engine(encoder, device="cpu", num_threads=1) as engine,
        serving_process(encoder, "--api-server-count", "2", "--convert", "embed", small=False) as server,
    ):
        local = await engine.embed(TEXTS)
        await server.ready()
        async with server.client() as client:
            for _ in range(8):
                answer = await client.post("/v1/embeddings", json={"model": "minilm", "input": TEXTS})
                assert answer.status_code == 200, answer.text
                for item, vector in zip(answer.json()["data"], local, strict=True):
                    np.testing.assert_allclose(item["embedding"], vector, atol=1e-5)
            refused = await client.post("/v1/completions", json={"model": "minilm", "prompt": "a"})
            assert refused.json()["error"]["code"] == "unsupported_task"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_that_only_pools_keeps_its_promises(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path / "cross", lambda: tiny_encoder.bert(1))
    async with (
        Engine(tmp_path / "cross", device="cpu", num_threads=1) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        run = await fuzz(client, tmp_path, "--phases", "coverage,fuzzing", "-n", "15", only=FUZZED)
    assert int(re.search(r"(\d+) generated", run["output"])[1]) > 1000
