"""Requests of clients that have no test of their own, and their checks of the answers: Vercel's AI SDK, LlamaIndex and
AnythingLLM, on the built-in model. The last two send it by the official clients."""

import json
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import events_of, running_server

pytestmark = pytest.mark.anyio

ASK = "What is the weather in Paris?"
RESULT = '{"temperature": 21, "condition": "sunny"}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = SCHEMA | {"additionalProperties": False}
ZOD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city"}
SUM = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": SUM, "required": ["a", "b"], "additionalProperties": False},
    },
}
TOOLS = [{"type": "function", "function": WEATHER | {"parameters": SCHEMA}}, ADD]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def serving(make_engine):
    """A plain client, and the official one."""
    settings = {"served_model_name": ("troupe",), "kv_cache_memory_bytes": 16 * 2**20}
    async with (
        make_engine(**settings) as engine,
        running_server(engine) as served,
        served.client() as client,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="-",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        ) as official,
    ):
        yield client, official


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = await client.post(path, json=body, headers={"user-agent": "ai-sdk/openai-compatible/2.0.0"})
    assert answer.status_code == 200, answer.text
    return answer


def is_text(value: object, *, missing: bool = True) -> bool:
    return isinstance(value, str) or (missing and value is None)


def check_chunk(chunk: dict[str, Any]) -> None:
    """As the AI SDK's schema of a chunk has it; one that does not fit ends its stream."""
    assert "error" not in chunk
    for choice in chunk["choices"]:
        delta = choice["delta"]
        assert delta.get("role") in (None, "assistant")
        assert all(is_text(delta.get(name)) for name in ("content", "reasoning", "reasoning_content"))
        for call in delta.get("tool_calls") or ():
            assert isinstance(call["index"], int)
            assert is_text(call.get("id"))
            assert is_text(call["function"].get("name"))
            assert is_text(call["function"].get("arguments"))
        assert is_text(choice.get("finish_reason"))
    if chunk.get("usage") is not None:
        assert all(isinstance(chunk["usage"][name], int) for name in ("prompt_tokens", "completion_tokens"))


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[list[str]], list[str]]:
    """Content, calls (id, name, arguments) and finish reasons of a stream."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        check_chunk(chunk)
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append([piece["id"], piece["function"]["name"], ""])
                calls[piece["index"]][2] += piece["function"].get("arguments") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return content, calls, reasons


async def test_requests_of_the_ai_sdk_to_chat_are_answered(builtin_engine):
    """Steps of `generateText` and `streamText` with tools, and `generateObject` by a schema as zod writes it."""
    asked = {"model": "troupe", "max_tokens": 200, "temperature": 0}
    step = asked | {"messages": [{"role": "user", "content": ASK}], "tools": TOOLS, "tool_choice": "auto"}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    form = {"schema": ZOD, "strict": True, "name": "response"}
    shaped = asked | {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    zod = {"tools": [{"type": "function", "function": WEATHER | {"parameters": ZOD}}], "tool_choice": NAMED}
    async with serving(builtin_engine) as (client, _):
        whole = (await post(client, CHAT, step)).json()
        chunks = events_of((await post(client, CHAT, step | streaming)).text)
        call = whole["choices"][0]["message"]["tool_calls"][0]
        past = {"id": call["id"], "type": "function", "function": call["function"]}
        messages = [
            *step["messages"],
            {"role": "assistant", "content": "", "tool_calls": [past]},
            {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
        ]
        answer = (await post(client, CHAT, step | {"messages": messages})).json()
        last = joined(events_of((await post(client, CHAT, step | streaming | {"messages": messages})).text))
        made = (await post(client, CHAT, shaped)).json()
        drawn = joined(events_of((await post(client, CHAT, shaped | streaming)).text))
        named = (await post(client, CHAT, step | zod)).json()
        found = await post(
            client, "/v1/embeddings", {"model": "troupe", "input": ["a", "b"], "encoding_format": "float"}
        )
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    content, calls, reasons = joined(chunks)
    assert (content, reasons) == ("", ["tool_calls"])
    assert [one[1:] for one in calls] == [["get_weather", call["function"]["arguments"]]]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert "21" in answer["choices"][0]["message"]["content"]
    assert last == (answer["choices"][0]["message"]["content"], [], ["stop"])
    jsonschema.validate(json.loads(made["choices"][0]["message"]["content"]), ZOD)
    assert drawn == (made["choices"][0]["message"]["content"], [], [made["choices"][0]["finish_reason"]])
    arguments = named["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    jsonschema.validate(json.loads(arguments), ZOD)
    vectors = [item["embedding"] for item in found.json()["data"]]
    assert len(vectors) == 2
    assert all(isinstance(value, float) for vector in vectors for value in vector)


async def test_requests_of_the_ai_sdk_to_responses_are_answered(builtin_engine):
    """Its default for `openai(...)`: what was stored is referred to by its id in the next step."""
    tool = {"type": "function"} | WEATHER | {"parameters": CLOSED, "strict": False}
    user = {"role": "user", "content": [{"type": "input_text", "text": ASK}]}
    step = {"model": "troupe", "input": [user], "max_output_tokens": 200, "temperature": 0}
    step |= {"tools": [tool], "tool_choice": "auto"}
    async with serving(builtin_engine) as (client, _):
        whole = (await post(client, "/v1/responses", step)).json()
        text = (await post(client, "/v1/responses", step | {"stream": True})).text
        (call,) = whole["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny, 21 degrees"}
        referred = step | {"input": [user, {"type": "item_reference", "id": call["id"]}, result]}
        answer = (await post(client, "/v1/responses", referred)).json()
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert all(is_text(call[name], missing=False) for name in ("id", "call_id", "arguments"))
    assert (whole["error"], isinstance(whole["created_at"], int)) == (None, True)
    assert all(isinstance(whole["usage"][name], int) for name in ("input_tokens", "output_tokens"))
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (done["name"], done["arguments"], done["status"]) == (call["name"], call["arguments"], "completed")
    assert [event["type"] for event in events][-1] == "response.completed"
    (part,) = answer["output"][-1]["content"]
    assert "21 degrees" in part["text"]
    assert (part["type"], part["annotations"]) == ("output_text", [])


async def test_requests_of_llama_index_are_answered(builtin_engine):
    """`OpenAILike` with tools: what it adds up from a stream of calls goes into the next request."""
    tools = [tool | {"function": tool["function"] | {"strict": False}} for tool in TOOLS]
    step = {"model": "troupe", "max_tokens": 200, "temperature": 0, "tools": tools, "tool_choice": "auto"}
    step |= {"parallel_tool_calls": False}
    user = {"role": "user", "content": ASK}
    async with serving(builtin_engine) as (_, client):
        pieces = []
        async for chunk in await client.chat.completions.create(messages=[user], stream=True, **step):
            pieces += [piece for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
        first = pieces[0]
        assert None not in (first.id, first.function.name, first.function.arguments), "more is added to each"
        for piece in pieces[1:]:
            assert (piece.index, piece.id, piece.function.name) == (0, None, None)
            first.function.arguments += piece.function.arguments
        past = {"role": "assistant", "content": None, "tool_calls": [first.model_dump()]}
        result = {"role": "tool", "content": RESULT, "name": "get_weather", "tool_call_id": first.id}
        answer = await client.chat.completions.create(messages=[user, past, result], **step)
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert "21" in answer.choices[0].message.content


async def test_requests_of_anything_llm_are_answered(builtin_engine):
    """Documents in the system message, and earlier turns."""
    context = "\nContext:\n[CONTEXT 0]:\nThe fox is red.\n[END CONTEXT 0]\n\n"
    messages = [
        {"role": "system", "content": f"Given the following conversation, answer.{context}"},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "What is 23 + 45?"},
    ]
    common = {"model": "troupe", "messages": messages, "temperature": 0.7, "seed": 1, "max_tokens": 24}
    async with serving(builtin_engine) as (_, client):
        whole = await client.chat.completions.create(**common)
        stream = await client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        models = [model.id async for model in client.models.list()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert models == ["troupe"]
