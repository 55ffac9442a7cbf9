"""Rows A12, B2, B5, B6, B8, B9, B12, B13, B15, C1 and F10 of the fault table on the routes that pool, beside canaries
that generate on the same model."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from troupellm.tests.support.checkpoints.tiny_model import CONTEXT, LOGITS_WIDTH
from troupellm.tests.support.servers.canary import Attacked, under_many as under_attack
from troupellm.tests.support.servers.matrix import OK, _refused, _served
from troupellm.tests.support.servers.serving import eventually, http_request, server_config

pytestmark = pytest.mark.anyio

VECTORS: dict[str, dict[str, Any]] = {"/v1/embeddings": {"input": "Hi"}, "/pooling": {"input": "Hi"}}
PAIRS: dict[str, dict[str, Any]] = {
    "/v1/score": {"text_1": "Hi", "text_2": ["a", "b"]},
    "/score": {"queries": "Hi", "documents": "a"},
    "/v1/rerank": {"query": "Hi", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "Hi", "documents": ["a", {"text": "b"}]},
    "/rerank": {"query": "Hi", "documents": ["a"]},
}
ALL = VECTORS | PAIRS
JSON = {"content-type": "application/json"}
Case = tuple[Mapping[str, Any], str | None]


async def check(
    attacked: Attacked, cases: Iterable[Case], routes: Mapping[str, dict[str, Any]] = ALL, status: int = 400
) -> None:
    wrong = []
    for fields, param in cases:
        for route, body in routes.items():
            given = {"model": attacked.engine.model_names[0]} | body | fields
            content = json.dumps(given).encode()  # also what is no Unicode
            response = await attacked.client.post(route, content=content, headers=JSON)
            problem = _served(response) if param == OK else _refused(response, status, param)
            if problem:
                wrong.append((route, str(fields)[:120], param, problem))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
async def test_B2_B3_a_number_out_of_range_is_refused_by_name(tiny_engine):
    numbers = ("dimensions", "truncate_prompt_tokens", "priority")
    cases = [({field: value}, field) for field in numbers for value in (1.5, "10", True, [], 2**64)]
    vectors = [*cases, ({"dimensions": 0}, "dimensions"), ({"dimensions": -1}, "dimensions")]
    vectors += [({"dimensions": 16}, "dimensions"), ({"dimensions": None}, OK)]  # the model is no Matryoshka
    shared = [case for case in cases if "dimensions" not in case[0]]
    shared += [({"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (0, -2, 2**31)]
    shared += [({"truncate_prompt_tokens": value}, OK) for value in (-1, 1, 5, None)]
    shared += [({"truncation_side": "left"}, "truncation_side"), ({"truncation_side": "middle"}, "truncation_side")]
    shared += [({"truncation_side": "left", "truncate_prompt_tokens": 3}, OK)]
    shared += [({"queue_timeout": value}, "queue_timeout") for value in (0, -1, "1")]
    shared += [({"use_activation": value}, "use_activation") for value in (1, "yes", [])]
    shared += [({"use_activation": False}, OK)]
    top_n = [({"top_n": value}, "top_n") for value in (-1, 1.5, "1", True)]
    top_n += [({"top_n": value}, OK) for value in (0, 1, 50, None)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, vectors, VECTORS)
        await check(attacked, shared)
        await check(attacked, top_n, {route: body for route, body in PAIRS.items() if "rerank" in route})


async def test_B5_B6_a_wrong_input_is_refused(tiny_engine):
    wrong = ([], [[]], [[1], []], [LOGITS_WIDTH], [-1], [2**40], [2**70], [1, "x"], [[1], "x"], [[1], 1], "", None)
    cases: list[Case] = []
    for value in wrong:
        param = {"[[]]": "input[0]", "[[1], []]": "input[1]"}.get(str(value), "input")
        cases.append(({"input": value}, param))
    cases += [({"input": ["x"] * 9}, "input"), ({"input": ["x"] * 8}, OK), ({"input": [1] * 300}, OK)]
    cases += [({"input": value}, OK) for value in ("x", [1, 2], ["x", "y"], [[1], [2, 3]], [LOGITS_WIDTH - 1])]
    cases += [({"input": [True]}, "input[0]"), ({"input": [[1, 1.5]]}, "input[0][1]"), ({"input": {"a": 1}}, "input")]
    cases += [({"input": 5}, "input"), ({"input": [None]}, "input[0]")]
    config = server_config(max_pooling_inputs=8)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        await check(attacked, cases, VECTORS)


async def test_B6_texts_that_make_no_pairs_are_refused(tiny_engine):
    scores: list[Case] = [
        ({"text_1": None}, "text_2"),
        ({"text_2": None}, "text_1"),
        ({"data_1": "a"}, "data_1"),
        ({"text_1": None, "text_2": None}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": [], "text_2": ["a"]}, "text_1"),
        ({"text_2": []}, "text_2"),
        ({"text_2": ["a"] * 9}, "text_2"),
        ({"text_2": [1]}, "text_2[0]"),
        ({"text_2": {"content": []}}, "text_2"),
        ({"text_2": ["a", "\ud800"]}, None),
        ({"text_1": ""}, "text_1"),
        ({"text_2": ""}, "text_2"),
        ({"text_2": ["a", "", "b"]}, "text_2[1]"),
        ({"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ({"text_1": ["a", "b"], "text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b"]}, OK),
    ]
    ranks: list[Case] = [
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1]"),
        ({"documents": ["a", {"text": 5}]}, "documents[1]"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": [""]}, "documents[0]"),
        ({"documents": ["a", "b", {"text": ""}]}, "documents[2]"),
        ({"query": ""}, "query"),
        ({"return_documents": False}, OK),
    ]
    config = server_config(max_pooling_inputs=8)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        await check(attacked, scores, {"/v1/score": PAIRS["/v1/score"]})
        await check(attacked, ranks, {route: body for route, body in PAIRS.items() if "rerank" in route})


@pytest.mark.slow
async def test_B8_B9_a_wrong_conversation_is_refused(tiny_engine):
    user = {"role": "user", "content": "Hi"}
    cases: list[Case] = [
        ({"messages": [user]}, "input"),
        ({"input": None, "messages": []}, "messages"),
        ({"input": None, "messages": [user] * 10_001}, "messages"),
        ({"input": None, "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"input": None, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"input": None, "messages": [user], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"input": None, "messages": [user], "tools": [{"type": "function"}]}, "tools"),
        ({"input": None, "messages": [user]}, OK),
        ({"input": None, "messages": [user], "add_generation_prompt": True}, OK),
    ]
    for name in ("tokenize", "chat_template", "messages", "__class__"):
        kwargs = {"input": None, "messages": [user], "chat_template_kwargs": {name: "x"}}
        cases.append((kwargs, "chat_template_kwargs"))
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, VECTORS)


async def test_B12_an_unknown_model_is_not_found(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for name in ("", "other", "../../x", "x\0y", "m" * 2**20):
            await check(attacked, [({"model": name}, "model")], status=404)
        await check(attacked, [({"model": 5}, "model")])


async def test_B15_tasks_of_other_engines_are_refused_by_name(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for task in ("token_embed", "token_classify", "plugin", "embed&token_classify"):
            response = await attacked.client.post("/pooling", json={"model": "tiny", "input": "Hi", "task": task})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, "task", "unsupported_parameter")
            assert task in error["message"]


@pytest.mark.slow
async def test_B13_a_wrong_salt_or_request_id_is_refused(tiny_engine):
    cases: list[Case] = [({"cache_salt": value}, "cache_salt") for value in ("", "x" * 129, "a/b", "a@b", 5)]
    cases += [({"user": value}, "user") for value in ("x" * 2**20, 5)]
    cases += [({"user": "\u202e\0é"}, OK), ({"cache_salt": "é"}, OK), ({"request_id": "r-1"}, OK)]
    cases += [({"request_id": value}, "request_id") for value in ("", "x" * 129, "a b", "a\nb")]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases)


@pytest.mark.slow
async def test_B15_fields_that_are_not_for_clients(tiny_engine):
    unknown = {"prompt_embeds": "AAAA", "kv_transfer_params": {"host": "x"}, "logits_processors": ["os.system"]}
    refused: list[Case] = [({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs")]
    forms: list[Case] = [({"encoding_format": value}, "encoding_format") for value in ("bytes", "float16", "", 5)][:2]
    forms += [({"encoding_format": 5}, "encoding_format"), ({"embed_dtype": "fp8_e4m3"}, "embed_dtype")]
    forms += [({"endianness": "big"}, "endianness"), ({"endianness": "middle"}, "endianness")]
    forms += [({"encoding_format": "base64", "endianness": "big"}, OK), ({"embed_dtype": "float32"}, OK)]
    tasks: list[Case] = [({"task": "dance"}, "task"), ({"task": 5}, "task"), ({"task": "classify"}, "model")]
    tasks += [({"task": "embed"}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, [*refused, (unknown, OK)])
        await check(attacked, forms, VECTORS)
        await check(attacked, tasks, {"/pooling": VECTORS["/pooling"]})
        await check(attacked, [({}, "model")], {"/classify": {"input": "x"}})


async def test_A12_C1_texts_that_are_odd_or_too_long(tiny_engine):
    long, odd = "x" * (CONTEXT + 1), ("\ud800", "a\0b", "\u0301" * 1000, "é" * 1000)
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        vectors: list[Case] = [({"input": text}, None if text == "\ud800" else OK) for text in odd]
        vectors += [({"input": long}, "input"), ({"input": [1] * (CONTEXT + 1)}, "input")]
        vectors += [({"input": "x" * 10**6}, "input"), ({"input": ["a", long]}, "input[1]")]
        vectors += [({"input": [[1], [1] * (CONTEXT + 1)]}, "input[1]"), ({"input": ["a", "b", ""]}, "input[2]")]
        vectors += [({"input": long, "truncate_prompt_tokens": -1}, OK), ({"input": [1] * CONTEXT}, OK)]
        await check(attacked, vectors, VECTORS)
        ranks: list[Case] = [({"documents": ["a", long]}, "documents[1]"), ({"query": long}, "query")]
        ranks += [({"documents": ["a", long], "truncate_prompt_tokens": -1}, OK)]
        await check(attacked, ranks, {"/v1/rerank": PAIRS["/v1/rerank"]})
        body = {"model": "tiny", "input": long}
        error = (await attacked.client.post("/v1/embeddings", json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]


async def test_D1_a_client_that_leaves_takes_its_call_along(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=20) as attacked:
        body = {"model": "tiny", "input": [f"a text {number}" for number in range(2000)]}
        steps = engine.snapshot().prompt_tokens_computed
        connection = await attacked.served.raw(http_request("/v1/embeddings", body))
        await eventually(lambda: engine.snapshot().prompt_tokens_computed > steps + 500)
        await connection.close()
        await eventually(lambda: len(attacked.served.host.in_flight) <= 2)  # the canaries'
        assert engine.snapshot().prompt_tokens_computed < 20_000


async def test_C3_a_full_server_refuses_at_once_and_takes_large_calls_in_turn(tiny_engine):
    settings = {"max_num_seqs": 8, "max_num_queued_reqs": 8}
    async with tiny_engine(**settings) as engine, under_attack(engine, canary_tokens=20) as attacked:
        body = {"model": "tiny", "input": ["a text"] * 400, "encoding_format": "base64"}
        whole = await attacked.client.post("/v1/embeddings", json=body)
    assert whole.status_code == 200
    assert len(whole.json()["data"]) == 400
