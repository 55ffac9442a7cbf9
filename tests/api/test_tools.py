"""Tools with the official client over a real socket, on the built-in model, which was trained to call them."""

import json
from contextlib import asynccontextmanager

import httpx
import jsonschema
import openai
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS
from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
BOOK = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Book a table",
        "parameters": {
            "type": "object",
            "properties": {
                "people": {"type": "integer", "minimum": 1, "maximum": 12},
                "day": {"enum": ["Monday", "Friday", "Sunday"]},
                "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
            },
            "required": ["people", "day"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, ADD, BOOK]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
ASK = {
    "model": "troupe",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 200,
    "temperature": 0,
}


@asynccontextmanager
async def sdk(**settings):
    small = SETTINGS | {"kv_cache_memory_bytes": 16 * 2**20}
    async with (
        Engine(None, served_model_name=("troupe",), **(small | settings)) as engine,
        running_server(engine) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="-",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        ) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
async def client(anyio_backend):
    """Of one engine for all tests that need no settings of their own."""
    async with sdk() as client:
        yield client


async def assembled(client, **request):
    """The stream's message, put together as clients do it, and the reason why it ended."""
    content, reasoning, calls, reasons = "", "", {}, []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": piece.id, "type": piece.type, "name": "", "arguments": ""})
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, reasoning, [calls[index] for index in sorted(calls)], reasons


async def test_a_tool_is_called_whole_and_streamed_and_its_result_is_read(client):
    request = ASK | {"tools": [WEATHER, ADD]}
    whole = (await client.chat.completions.create(**request)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    content, _, calls, reasons = await assembled(client, **request)
    assert (content, reasons) == ("", ["tool_calls"])
    assert [(c["type"], c["name"], c["arguments"]) for c in calls] == [
        ("function", "get_weather", call.function.arguments)
    ]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    history = [*ASK["messages"], whole.message.model_dump(exclude_none=True), result]
    answer = (await client.chat.completions.create(**request | {"messages": history})).choices[0]
    assert answer.finish_reason == "stop"
    assert "21" in answer.message.content


async def test_history_shows_the_model_what_it_wrote(client):
    """A past call costs the same tokens however its arguments were spelt."""
    arguments = ['{"city": "Paris"}', '{"city":"Paris"}', {"city": "Paris"}]
    counts = []
    for given in arguments:
        call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": given}}
        messages = [
            *ASK["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny, 3 degrees"},
        ]
        answer = await client.chat.completions.create(**ASK | {"messages": messages, "tools": TOOLS})
        counts.append(answer.usage.prompt_tokens)
    assert len(set(counts)) == 1


async def test_a_named_tool_is_called_with_arguments_that_validate(client):
    """For every prompt, streamed and not, greedy and sampled."""
    for name, seed, temperature in [(name, 5, temperature) for name in SCHEMAS for temperature in (0.0, 1.0)]:
        choice = {"type": "function", "function": {"name": name}}
        request = ASK | {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "seed": seed}
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert whole.finish_reason == "stop", whole
        (call,) = whole.message.tool_calls
        assert call.function.name == name
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[name])
        content, _, calls, reasons = await assembled(client, **request)
        assert (content, reasons) == ("", ["stop"])
        assert [(c["name"], c["arguments"]) for c in calls] == [(name, call.function.arguments)]


async def test_required_calls_some_tool(client):
    request = ASK | {"tools": TOOLS, "tool_choice": "required", "messages": [{"role": "user", "content": "Hello!"}]}
    whole = (await client.chat.completions.create(**request, parallel_tool_calls=False)).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


async def test_a_forced_call_that_is_cut_is_no_call_to_run(client):
    """A limit within the name is neither told as a call nor shown as text. A stop string in arguments cuts nothing."""
    for cut, reason, arguments in (
        ({"stop": ["Par"]}, "stop", ['{"city": "Paris"}']),
        ({"max_tokens": 8}, "length", []),
    ):
        choice = {"type": "function", "function": {"name": "get_weather"}}
        request = ASK | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False} | cut
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert whole.finish_reason == reason
        assert not whole.message.content
        assert [call.function.arguments for call in whole.message.tool_calls or []] == arguments
        content, _, calls, reasons = await assembled(client, **request)
        assert (content, reasons) == ("", [reason])
        assert [call["arguments"] for call in calls] == arguments


async def test_a_model_that_does_not_think_is_bound_all_the_same():
    """The built-in model opens no thoughts by itself: form and calls hold from its first token."""
    async with sdk(reasoning_parser="qwen3", tool_call_parser="hermes") as client:
        schema = {"type": "json_schema", "json_schema": {"name": "add", "schema": SCHEMAS["add"]}}
        whole = (await client.chat.completions.create(**ASK, response_format=schema)).choices[0]
        assert whole.finish_reason == "stop"
        jsonschema.validate(json.loads(whole.message.content), SCHEMAS["add"])
        choice = {"type": "function", "function": {"name": "add"}}
        whole = (await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)).choices[0]
        assert whole.finish_reason == "stop"
        jsonschema.validate(json.loads(whole.message.tool_calls[0].function.arguments), SCHEMAS["add"])


async def test_none_calls_none_and_allowed_tools_leaves_some(client):
    whole = (await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none")).choices[0]
    assert whole.message.tool_calls is None
    assert whole.message.content
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    whole = (await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=allowed)).choices[0]
    assert {call.function.name for call in whole.message.tool_calls} == {"add"}


async def test_choices_call_for_themselves(client):
    request = ASK | {"tools": [BOOK], "tool_choice": "required", "n": 3, "temperature": 1.0, "seed": 3}
    whole = await client.chat.completions.create(**request, parallel_tool_calls=False)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * 3
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMAS["book_table"])
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls}) == 3


async def test_strict_binds_a_tool_that_nobody_forces(client):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    request = ASK | {"tools": [strict, ADD]}
    whole = (await client.chat.completions.create(**request)).choices[0]
    assert [call.function.name for call in whole.message.tool_calls or []] == ["get_weather"]
    jsonschema.validate(json.loads(whole.message.tool_calls[0].function.arguments), SCHEMAS["get_weather"])
    plain = ASK | {"tools": [strict], "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    assert (await client.chat.completions.create(**plain)).choices[0].finish_reason == "stop"


async def test_the_parser_may_be_named_or_left_out():
    async with sdk(tool_call_parser="none") as client:
        whole = (await client.chat.completions.create(**ASK, tools=TOOLS)).choices[0]
        assert whole.message.tool_calls is None
        assert "<tool_call>" in whole.message.content
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="required")
    async with sdk(tool_call_parser="llama3_json", enable_auto_tool_choice=False) as client:
        assert (await client.chat.completions.create(**ASK, tools=TOOLS)).choices[0].message.tool_calls is None
        whole = (await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="required")).choices[0]
        assert whole.message.tool_calls
        for call in whole.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "kimi_k2" else pytest.mark.slow) for name in DISTINCT_PARSERS],
)
async def test_every_syntax_forced_gives_calls_that_validate(name):
    """The built-in model is made to write as every family does; what it writes is read as calls again."""
    async with sdk(tool_call_parser=name) as client:
        for choice in ("required", {"type": "function", "function": {"name": "book_table"}}):
            request = ASK | {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": 11}
            request |= {"parallel_tool_calls": False, "max_tokens": 400, "reasoning_effort": "none"}
            whole = (await client.chat.completions.create(**request)).choices[0]
            assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop"), whole
            assert whole.message.content is None
            (call,) = whole.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            content, _, calls, _ = await assembled(client, **request)
            assert content == ""
            assert [(c["name"], c["arguments"]) for c in calls] == [(call.function.name, call.function.arguments)]


async def test_an_answer_of_some_form_may_call_a_tool_instead(client):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = ASK | {"tools": [WEATHER], "response_format": form}
    whole = (await client.chat.completions.create(**request)).choices[0]
    assert [call.function.name for call in whole.message.tool_calls or []] == ["get_weather"]
    request |= {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = (await client.chat.completions.create(**request)).choices[0]
    if whole.message.tool_calls is None:
        jsonschema.validate(json.loads(whole.message.content), schema)


async def test_a_format_is_one_of_texts_and_says_nothing_where_a_tool_must_be_called(client):
    request = ASK | {"tools": [WEATHER], "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    answers = [
        (await client.chat.completions.create(**request, **more)).choices[0] for more in ({}, {"response_format": form})
    ]
    calls = [[call.function for call in answer.message.tool_calls] for answer in answers]
    assert calls[0] == calls[1]
    assert [call.name for call in calls[1]] == ["get_weather"]


async def test_the_clients_own_helper_puts_a_stream_together(client):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with client.chat.completions.stream(**ASK, tools=[strict]) as stream:
        kinds = {event.type async for event in stream}
        final = (await stream.get_final_completion()).choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.message.tool_calls
    assert call.function.parsed_arguments == {"city": "Paris"}
    assert final.finish_reason == "tool_calls"


async def test_several_calls_in_one_answer(client):
    """The model would end after one, so it is kept from ending for as long as one takes."""
    request = ASK | {"tools": [WEATHER], "tool_choice": "required", "extra_body": {"min_tokens": 40}}
    whole = (await client.chat.completions.create(**request)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert len(whole.message.tool_calls) > 1
    for call in whole.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["get_weather"])
    _, _, calls, _ = await assembled(client, **request)
    assert [c["arguments"] for c in calls] == [c.function.arguments for c in whole.message.tool_calls]
    assert len({c["id"] for c in calls}) == len(calls)
    one = (await client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="required")).choices[0]
    assert len(one.message.tool_calls) == 1


async def test_a_budget_ends_thoughts_and_form_and_calls_begin_behind_them():
    """The built-in model read as one whose answers begin with thoughts, which it does not know how to end."""
    async with sdk(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as client:
        told = [{"role": "user", "content": "Tell me a story about a fox."}]  # much longer than the budget
        ask = ASK | {"messages": told, "extra_body": {"thinking_token_budget": 6}}
        plain = await client.chat.completions.create(**ask)
        message = plain.choices[0].message
        assert message.reasoning_content
        assert plain.usage.completion_tokens_details.reasoning_tokens in (6, 7)
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        formed = (await client.chat.completions.create(**ask, response_format=form)).choices[0]
        assert formed.message.reasoning_content == message.reasoning_content
        jsonschema.validate(json.loads(formed.message.content), schema)
        choice = {"type": "function", "function": {"name": "book_table"}}
        forced = ask | {"tools": TOOLS, "tool_choice": choice}
        called = (await client.chat.completions.create(**forced)).choices[0]
        assert called.finish_reason == "stop"
        assert called.message.reasoning_content
        (call,) = called.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["book_table"])
        content, reasoning, calls, _ = await assembled(client, **forced)
        assert (content, reasoning) == ("", called.message.reasoning_content)
        assert calls[0]["arguments"] == call.function.arguments


async def test_a_front_in_another_process_speaks_the_same():
    """Guides, kept tokens and marks cross the socket; answers are parsed where they are read."""
    small = SETTINGS | {"kv_cache_memory_bytes": 16 * 2**20}
    choice = {"type": "function", "function": {"name": "book_table"}}
    async with Engine(None, **small) as engine, front_pair(engine) as pair:
        answers = []
        for door in (engine, pair.remote):
            async with door.chat(
                ASK["messages"], tools=TOOLS, tool_choice=choice, temperature=0.0, max_tokens=200, streaming=False
            ) as stream:
                answers.append((await stream.collect()).choices[0].message)
        assert [call.name for call in answers[1].tool_calls] == ["book_table"]
        assert answers[0].tool_calls[0].arguments == answers[1].tool_calls[0].arguments
        jsonschema.validate(json.loads(answers[1].tool_calls[0].arguments), SCHEMAS["book_table"])
