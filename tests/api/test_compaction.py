"""Compaction through the app on a socket: by its own route, by an item, and at a threshold."""

import json

import openai
import pytest

from troupellm.server.responses.sealed import unsealed
from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
TALK = [
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Three"},
]
TRIGGER = {"type": "compaction_trigger"}
LAST = '"user":"Three"}'


def events_of(text: str) -> list[dict]:
    return [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block]


async def test_openais_client_compacts_a_conversation_and_goes_on(tiny_engine):
    async with (
        tiny_engine() as engine,
        running_server(engine) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS),
        ) as client,
    ):
        compacted = await client.responses.compact(model="tiny", input=TALK, instructions="Be brief.")
        (item,) = compacted.output
        sent = [item.model_dump(exclude_none=True), {"role": "user", "content": "Four"}]
        answer = await client.responses.create(model="tiny", input=sent, max_output_tokens=4)
    assert (compacted.object, item.type) == ("response.compaction", "compaction")
    assert unsealed(item.encrypted_content).endswith(LAST)
    assert compacted.usage.total_tokens == compacted.usage.input_tokens + compacted.usage.output_tokens > 0
    assert answer.output[0].type == "message"


async def test_a_trigger_makes_one_item_whole_and_streamed(tiny_engine):
    body = GREEDY | {"input": [*TALK, TRIGGER]}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await client.post("/v1/responses", json=body)).json()
        streamed = events_of((await client.post("/v1/responses", json=body | {"stream": True})).text)
        kept = (await client.get(f"/v1/responses/{whole['id']}")).json()
        misplaced = await client.post("/v1/responses", json={"input": [TRIGGER, *TALK]})
    assert [item["type"] for item in whole["output"]] == ["compaction"]
    assert kept["output"] == whole["output"]
    assert [event["type"].removeprefix("response.") for event in streamed] == [
        "created",
        "in_progress",
        "output_item.added",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in streamed] == list(range(5))
    (item,) = streamed[-1]["response"]["output"]
    assert item["encrypted_content"] == whole["output"][0]["encrypted_content"]
    assert (misplaced.status_code, misplaced.json()["error"]["param"]) == (400, "input[0]")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_threshold_is_compacted_before_the_answer(tiny_engine, stream):
    def body(tokens: int) -> dict:
        managed = [{"type": "compaction", "compact_threshold": tokens}]
        return GREEDY | {"input": TALK, "context_management": managed, "stream": stream}

    async def answer_to(client, asked: dict) -> dict:
        response = await client.post("/v1/responses", json=asked)
        assert response.status_code == 200, response.text
        return events_of(response.text)[-1]["response"] if stream else response.json()

    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        tokens = (await client.post("/v1/responses/input_tokens", json={"input": TALK})).json()["input_tokens"]
        plain = await answer_to(client, body(tokens))
        compacted = await answer_to(client, body(tokens - 1))
        following = GREEDY | {"input": "Four", "previous_response_id": compacted["id"], "stream": stream}
        following_answer = await answer_to(client, following)
    assert [item["type"] for item in plain["output"]] == ["message"]
    assert [item["type"] for item in compacted["output"]] == ["compaction", "message"]
    assert unsealed(compacted["output"][0]["encrypted_content"]).endswith(LAST)
    assert compacted["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    assert following_answer["status"] == "incomplete"


async def test_a_conversation_that_is_too_long_to_summarize_says_so(tiny_engine):
    long = {"input": [{"role": "user", "content": "x" * 300}, TRIGGER]}
    async with tiny_engine(max_model_len=64) as engine, running_server(engine) as served, served.client() as client:
        route = await client.post("/v1/responses/compact", json={"input": "x" * 300})
        whole = await client.post("/v1/responses", json=long)
        streamed = events_of((await client.post("/v1/responses", json=long | {"stream": True})).text)
    for refused in (route, whole):
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert streamed[-1]["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_the_prompt_of_a_summary_comes_from_the_prefix_cache_with_its_tools(builtin_engine, choice):
    tools = [{"type": "function", "name": "look", "description": "x" * 200, "parameters": {"type": "object"}}]
    body = GREEDY | {"input": TALK, "tools": tools}
    async with builtin_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = (await client.post("/v1/responses", json=body)).json()
        asked = body | {"input": [*TALK, TRIGGER], "tool_choice": choice}
        compacted = (await client.post("/v1/responses", json=asked)).json()
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    cached = compacted["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached > answer["usage"]["input_tokens"] - 32 > 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"min_tokens": -3}, "min_tokens"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"temperature": 9}, "temperature"),
    ],
)
async def test_wrong_sampling_values_are_refused_as_they_are_by_responses(tiny_engine, fields, param):
    trigger = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, body in (
            ("/v1/responses", {"input": "Hi", "store": False}),
            ("/v1/responses", {"input": trigger, "store": False, "stream": True}),
            ("/v1/responses/compact", {"input": "Hi"}),
        ):
            answer = await client.post(path, json=body | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, answer.text)
