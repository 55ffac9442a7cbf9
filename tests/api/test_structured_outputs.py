"""Structured outputs over HTTP: every spelling gives output of that form, streamed and not."""

import json
import re

import jsonschema
import pytest

from troupellm.tests.support.servers.serving import events_of, running_server

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
        "end": "</a>",
    },
}


def fits_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def fits(pattern: str):
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


CASES = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, fits_schema),
    ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, fits_schema),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, fits_schema),
    ({"structured_outputs": {"regex": "[ab]{2,4}c"}}, fits("[ab]{2,4}c")),
    ({"structured_outputs": {"choice": ["red", "green"]}}, fits("red|green")),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ | "y"'}}, fits("x[0-9]|y")),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] | "y"'}}, fits("x[0-9]|y")),
    ({"structured_outputs": {"structural_tag": TAG}}, fits(r"<a>\s*[12]\s*</a>")),
    ({"response_format": TAG}, fits(r"<a>\s*[12]\s*</a>")),
    ({"guided_json": SCHEMA}, fits_schema),
    ({"guided_regex": "[ab]{2,4}c"}, fits("[ab]{2,4}c")),
    ({"guided_choice": ["red", "green"]}, fits("red|green")),
    ({"guided_grammar": 'start: "x" | "y"'}, fits("x|y")),
]


def text_of(body: dict) -> tuple[str, str]:
    choice = body["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]


def streamed(text: str) -> tuple[str, str]:
    choices = [event["choices"][0] for event in events_of(text) if event["choices"]]
    pieces = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
    return "".join(piece or "" for piece in pieces), choices[-1]["finish_reason"]


async def test_every_spelling_on_every_route(tiny_engine):
    options = {"model": "tiny", "max_tokens": 300, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for fields, check in CASES:
            for route, prompt in ROUTES.items():
                whole = await client.post(route, json=options | prompt | fields)
                assert whole.status_code == 200, whole.text
                text, reason = text_of(whole.json())
                pieces = await client.post(route, json=options | prompt | fields | {"stream": True})
                assert streamed(pieces.text) == (text, reason)
                assert reason == "stop", (fields, text)
                check(text)
        guide = engine.snapshot().guide
        metrics = (await client.get("/metrics")).text
    assert guide.compiles <= len(CASES)
    assert guide.hits >= 3 * len(CASES)
    assert f'troupellm_guide_compiles_total{{engine="0",model_name="tiny"}} {float(guide.compiles)}' in metrics


async def test_an_answer_in_json_mode_is_an_object(tiny_engine):
    request = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny", "max_tokens": 200, "seed": 1}
    request |= {"response_format": {"type": "json_object"}, "logit_bias": {}}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answers = [
            (await client.post("/v1/chat/completions", json=request | {"seed": seed})).json() for seed in range(8)
        ]
    finished = [text for text, reason in map(text_of, answers) if reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}}}},
            "response_format.json_schema",
            "not",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "nothing"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}},
            "structured_outputs.structural_tag",
            "x",
        ),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "false"),
    ],
)
async def test_unsupported_schemas_are_refused_by_name(tiny_engine, fields, param, word):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        response = await client.post("/v1/completions", json=body | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_schema", param)
    assert word in error["message"]
