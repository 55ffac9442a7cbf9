"""Sampling extras under vLLM's names on every API that chats: taken as chat completions do, or refused by name."""

import json
from typing import Any

import msgspec
import pytest
from tokenizers import pre_tokenizers

from troupellm.protocol.api.anthropic import MessagesRequest
from troupellm.protocol.api.extensions import DescriptiveFields, ExtraFields
from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.tests.support.servers.serving import running_server
from troupellm.tests.support.workers.plug_ins import MODULE as PLUG_IN_MODULE

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
LENGTHS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens", CHAT: "max_completion_tokens"}
PLUG_INS = (f"only={PLUG_IN_MODULE}:OnlyToken",)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""By token id, in the tiny model's tokenizer."""
TOKEN = LETTERS.index("g")
ONLY = {"logits_processors": {"only": {"token": TOKEN}}, "ignore_eos": True}


def body_of(route: str, text: str = "Hi", length: int = 6, **extra: Any) -> dict[str, Any]:
    asked = {"input": text} if route == RESPONSES else {"messages": [{"role": "user", "content": text}]}
    return {"model": "tiny", "temperature": 0, LENGTHS[route]: length} | asked | extra


async def whole(client: Any, route: str, **given: Any) -> dict[str, Any]:
    answer = await client.post(route, json=body_of(route, **given))
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def text_of(route: str, answer: dict[str, Any]) -> str:
    if route == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    content = answer["output"][-1]["content"] if route == RESPONSES else answer["content"]
    return str(content[0]["text"])


async def events(client: Any, route: str, **given: Any) -> list[dict[str, Any]]:
    answer = await client.post(route, json=body_of(route, **given) | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def pieces(route: str, told: list[dict[str, Any]]) -> list[str]:
    """The texts of the events that have any."""
    if route == RESPONSES:
        found = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    elif route == MESSAGES:
        found = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    else:
        found = [event["choices"][0]["delta"].get("content") for event in told]
    return [text for text in found if text]


@pytest.mark.parametrize("kind", [ResponsesRequest, MessagesRequest])
def test_no_extra_of_chat_completions_is_passed_over(kind: type[msgspec.Struct]) -> None:
    descriptive = set(DescriptiveFields.__struct_fields__)
    offered = {field.name for field in msgspec.structs.fields(ExtraFields) if field.type is not Any} - descriptive
    assert len(offered) > 10
    assert offered <= set(kind.__struct_fields__)


async def test_plug_ins_of_the_server_are_asked_for_by_name_or_argument(tiny_engine: Any) -> None:
    async with (
        tiny_engine(logits_processors=PLUG_INS) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for route in LENGTHS:
            for extra in (ONLY, {"vllm_xargs": {"token": TOKEN}, "ignore_eos": True}):
                assert text_of(route, await whole(client, route, **extra)) == "gggggg"
                assert "".join(pieces(route, await events(client, route, **extra))) == "gggggg"


async def test_repetition_ends_an_answer(tiny_engine: Any) -> None:
    wanted = ONLY | {"repetition_detection": {"max_pattern_size": 1, "min_count": 3}}
    async with (
        tiny_engine(logits_processors=PLUG_INS) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        answers = {route: await whole(client, route, length=20, **wanted) for route in LENGTHS}
    assert {route: text_of(route, answer) for route, answer in answers.items()} == dict.fromkeys(LENGTHS, "ggg")
    assert answers[CHAT]["choices"][0]["finish_reason"] == "repetition"
    assert (answers[RESPONSES]["status"], answers[MESSAGES]["stop_reason"]) == ("completed", "end_turn")


async def test_events_are_as_wide_as_asked_for(tiny_engine: Any) -> None:
    async with (
        tiny_engine(logits_processors=PLUG_INS, flush_interval=0.5) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for route in LENGTHS:
            single = pieces(route, await events(client, route, length=12, stream_interval=1, **ONLY))
            assert single == ["g"] * 12, route
            wide = pieces(route, await events(client, route, length=24, stream_interval=5, **ONLY))
            assert "".join(wide) == "g" * 24
            assert min(len(text) for text in wide[1:-1]) >= 5, route


async def test_prompts_are_cut_and_usage_says_so(tiny_engine: Any) -> None:
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for cut in ({"truncate_prompt_tokens": 7}, {"truncate_prompt_tokens": 7, "truncation_side": "right"}):
            usage = (await whole(client, RESPONSES, text="y" * 6_000, **cut))["usage"]
            assert (usage["input_tokens"], usage["input_tokens_details"]["truncated"]) == (7, True)
            usage = (await whole(client, MESSAGES, text="y" * 6_000, **cut))["usage"]
            assert (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["truncated"]) == (7, True)
        plain = await whole(client, RESPONSES), await whole(client, MESSAGES)
    assert "truncated" not in plain[0]["usage"]["input_tokens_details"]
    assert "truncated" not in plain[1]["usage"]


async def test_responses_tell_the_log_probabilities_of_listed_tokens(tiny_engine: Any) -> None:
    listed = [TOKEN, 3]
    extra = {"logprob_token_ids": listed, "include": ["message.output_text.logprobs"], "ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await whole(client, RESPONSES, **extra)
        told = await events(client, RESPONSES, **extra)
    entries = answer["output"][-1]["content"][0]["logprobs"]
    assert entries
    assert all([top["token"] for top in entry["top_logprobs"]] == ["g", LETTERS[3]] for entry in entries)
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event["logprobs"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]


async def test_a_message_is_named_by_its_client(tiny_engine: Any) -> None:
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        assert (await whole(client, MESSAGES, request_id="mine.7"))["id"] == "msg_mine.7"
        assert (await events(client, MESSAGES, request_id="mine.7"))[0]["message"]["id"] == "msg_mine.7"


NOWHERE: dict[str, Any] = {
    "logits_processors": {"nobody": {}},
    "vllm_xargs": {"nobody": 1},
    "stream_interval": 0,
    "truncate_prompt_tokens": 0,
    "truncation_side": "left",
    "repetition_detection": {"max_pattern_size": 0},
    "thinking_token_budget": 3,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
}
REFUSED = {
    RESPONSES: NOWHERE | {"request_id": "mine", "logprob_token_ids": []},
    MESSAGES: NOWHERE | {"request_id": "a b", "logprob_token_ids": [1]},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_and_misplaced_extra_fields_are_refused_by_name(tiny_engine: Any, stream: bool) -> None:
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for route, fields in REFUSED.items():
            for name, value in fields.items():
                answer = await client.post(route, json=body_of(route, stream=stream, **{name: value}))
                assert answer.status_code == 400, (route, name, answer.text)
                error = answer.json()["error"]
                assert name in error["message"], (route, error)
                assert route == MESSAGES or error["param"].partition(".")[0] == name, error
            nothing = {"return_token_ids": False, "kv_transfer_params": None, "logits_processors": [], "vllm_xargs": {}}
            assert await whole(client, route, **nothing)
