"""openai's responses API and anthropic's client on the built-in model: tools, structured output, and what coding agents
send; and thinking, on a model that is made to think."""

import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

MODEL = {"model": "troupe", "max_output_tokens": 200, "temperature": 0}
CLAUDE = {"model": "troupe", "max_tokens": 200, "extra_body": {"temperature": 0}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "description": "Get the weather in a city", "parameters": SCHEMA}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
USE = {"name": "get_weather", "description": "Get the weather in a city", "input_schema": SCHEMA}
ASK = "What is the weather in Paris?"


@asynccontextmanager
async def clients(make_engine, **settings):
    settings = {"served_model_name": ("troupe",), "kv_cache_memory_bytes": 16 * 2**20} | settings
    async with (
        make_engine(**settings) as engine,
        running_server(engine) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="-",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        ) as gpt,
        anthropic.AsyncAnthropic(
            base_url=served.url,
            api_key="-",
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS),
        ) as claude,
    ):
        yield gpt, claude


class Person(BaseModel):
    name: str
    age: int


async def test_functions_and_structured_text_in_responses(builtin_engine):
    async with clients(builtin_engine) as (gpt, _):
        whole = await gpt.responses.create(input=ASK, tools=[TOOL], **MODEL)
        (call,) = whole.output
        async with gpt.responses.stream(input=ASK, tools=[TOOL], **MODEL) as stream:
            events = [event async for event in stream]
        streamed = (await stream.get_final_response()).output[0]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
        again = await gpt.responses.create(input=[result], previous_response_id=whole.id, tools=[TOOL], **MODEL)
        by_hand = [{"role": "user", "content": ASK}, call, result]
        same = await gpt.responses.create(input=by_hand, tools=[TOOL], **MODEL)
        choices = ["required", {"type": "function", "name": "get_weather"}]
        choices.append(
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
        )
        forced = [
            (await gpt.responses.create(input="Tell me a story.", tools=[TOOL], tool_choice=choice, **MODEL)).output
            for choice in choices
        ]
        refused = await gpt.responses.create(input=ASK, tools=[TOOL], tool_choice="none", **MODEL)
        parsed = await gpt.responses.parse(input="A person named Tom who is 7, as JSON.", text_format=Person, **MODEL)
        free = await gpt.responses.create(input="A JSON object.", text={"format": {"type": "json_object"}}, **MODEL)
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call",
        "get_weather",
        '{"city": "Paris"}',
        "completed",
    )
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert "21 degrees" in again.output_text
    assert again.output_text == same.output_text
    for (only,) in forced:
        assert only.type == "function_call"
        assert set(json.loads(only.arguments)) == {"city"}
    assert all(item.type == "message" for item in refused.output)
    assert isinstance(parsed.output_parsed, Person)
    assert isinstance(json.loads(free.output_text), dict)


async def test_tools_and_structured_text_in_messages(builtin_engine):
    question = {"role": "user", "content": ASK}
    async with clients(builtin_engine) as (_, claude):
        whole = await claude.messages.create(messages=[question], tools=[USE], **CLAUDE)
        (use,) = whole.content
        async with claude.messages.stream(messages=[question], tools=[USE], **CLAUDE) as stream:
            partial = [event.partial_json async for event in stream if event.type == "input_json"]
            streamed = await stream.get_final_message()
        result = {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "sunny, 21 degrees"}],
        }
        history = [question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        answer = await claude.messages.create(messages=history, tools=[USE], **CLAUDE)
        counted = await claude.messages.count_tokens(model="troupe", messages=history, tools=[USE])
        story = [{"role": "user", "content": "Tell me a story."}]
        forced = [
            await claude.messages.create(messages=story, tools=[USE], tool_choice=choice, **CLAUDE)
            for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"})
        ]
        silent = await claude.messages.create(messages=[question], tools=[USE], tool_choice={"type": "none"}, **CLAUDE)
        form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        shaped = await claude.messages.create(messages=story, **form, **CLAUDE)
        async with claude.messages.stream(messages=story, **form, **CLAUDE) as stream:
            pieces = [piece async for piece in stream.text_stream]
            shaped_streamed = await stream.get_final_message()
    assert (use.type, use.name, use.input, whole.stop_reason) == (
        "tool_use",
        "get_weather",
        {"city": "Paris"},
        "tool_use",
    )
    assert (streamed.content[0].input, streamed.stop_reason) == (use.input, "tool_use")
    assert json.loads("".join(partial)) == use.input
    assert "21 degrees" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    for message in forced:
        assert [(block.type, set(block.input)) for block in message.content] == [("tool_use", {"city"})]
    assert all(block.type == "text" for block in silent.content)
    assert set(json.loads(shaped.content[0].text)) == {"city"}
    assert "".join(pieces) == shaped_streamed.content[0].text == shaped.content[0].text
    assert shaped_streamed.stop_reason == shaped.stop_reason


async def test_an_answer_that_the_client_has_begun_is_gone_on_with(builtin_engine):
    question = {"role": "user", "content": "Say hello in Polish."}
    async with clients(builtin_engine) as (_, claude):
        whole = (await claude.messages.create(messages=[question], **CLAUDE)).content[0].text
        begun, _, rest = whole.partition(" ")
        messages = [question, {"role": "assistant", "content": begun}]
        gone_on = await claude.messages.create(messages=messages, **CLAUDE)
        async with claude.messages.stream(messages=messages, **CLAUDE) as stream:
            streamed = await stream.get_final_message()
        counted = await claude.messages.count_tokens(model="troupe", messages=messages)
    assert rest
    assert gone_on.content[0].text == streamed.content[0].text == f" {rest}"
    assert counted.input_tokens == streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens


async def test_an_answer_that_ends_at_once_has_one_usage_in_all_its_events(builtin_engine):
    question = {"role": "user", "content": "Say hello in Polish. " * 20}
    async with clients(builtin_engine) as (_, claude):
        await claude.messages.create(messages=[question], **CLAUDE | {"max_tokens": 1})
        stream = await claude.messages.create(messages=[question], stream=True, **CLAUDE | {"max_tokens": 1})
        events = [event async for event in stream]
    (begin,) = [event.message.usage for event in events if event.type == "message_start"]
    (end,) = [event.usage for event in events if event.type == "message_delta"]
    assert end.cache_read_input_tokens > 0
    assert (begin.input_tokens, begin.cache_read_input_tokens) == (end.input_tokens, end.cache_read_input_tokens)


async def test_a_function_in_a_namespace_is_called_by_both_its_names(builtin_engine):
    """As Codex has those of MCP servers; another namespace has one of the same name."""
    group = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": [ADD]}
    tools = [TOOL, group | {"name": "mcp__other"}, group]
    choice = {"type": "function", "name": "add", "namespace": "mcp__sums"}
    request = {"input": "What is 3 + 4?", "tools": tools, "tool_choice": choice} | MODEL
    async with clients(builtin_engine) as (gpt, _):
        whole = await gpt.responses.create(**request)
        events = [event async for event in await gpt.responses.create(stream=True, **request)]
        (call,) = whole.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        free = request | {"tool_choice": "none"}
        kept = await gpt.responses.create(**free | {"input": [result], "previous_response_id": whole.id})
        given = [{"role": "user", "content": request["input"]}, call, result]
        by_hand = await gpt.responses.create(**free | {"input": given})
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__sums", "add")
    assert set(json.loads(call.arguments)) == {"a", "b"}
    (streamed,) = events[-1].response.output
    assert (streamed.namespace, streamed.name, streamed.arguments) == ("mcp__sums", "add", call.arguments)
    begun = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in begun] == [("mcp__sums", "add")]
    assert kept.output_text == by_hand.output_text
    assert kept.usage.input_tokens == by_hand.usage.input_tokens


async def test_a_request_of_codex_is_answered_as_a_stream(builtin_engine):
    """Its tools and items, reasoning from elsewhere among them, with nothing stored, streamed."""
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
    }
    inner = {"type": "namespace", "name": "mcp__x", "description": "", "tools": [ADD]}
    request = MODEL | {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB", "content": None},
            {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Paris"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny, 21 degrees"},
        ],
        "tools": [TOOL | {"strict": False}, patch, inner, {"type": "web_search"}, {"type": "image_generation"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
    }
    async with clients(builtin_engine) as (gpt, _):
        events = [event async for event in await gpt.responses.create(stream=True, **request)]
        probe = await gpt.responses.create(model="troupe", input=[], max_output_tokens=1, store=False)
        with pytest.raises(openai.NotFoundError):
            await gpt.responses.retrieve(events[-1].response.id)
    assert events[-1].type == "response.completed"
    assert "21 degrees" in events[-1].response.output_text
    assert [tool.name for tool in events[-1].response.tools] == ["get_weather", "mcp__x"]
    assert probe.usage.output_tokens == 1


async def test_requests_as_claude_code_sends_them_are_answered(builtin_engine):
    """System blocks with cache marks, thinking in the history, tools of both kinds, beta headers, streamed."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are a coding agent."} | mark, {"type": "text", "text": "Be brief."} | mark]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": ASK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need the weather.", "signature": "EqQBCkgIARAB"},
                {"type": "tool_use", "id": "toolu_01", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "sunny, 21 degrees"} | mark,
                {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"} | mark,
            ],
        },
    ]
    tools = [USE, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    async with clients(builtin_engine) as (_, claude):
        async with claude.beta.messages.stream(
            model="troupe",
            max_tokens=16_000,
            system=system,
            messages=messages,
            tools=tools,
            thinking={"type": "enabled", "budget_tokens": 8_000},
            metadata={"user_id": "user_1_account__session_2"},
            betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_body={"temperature": 1, "seed": 1},
        ) as stream:
            final = await stream.get_final_message()
        counted = await claude.messages.count_tokens(model="troupe", system=system, messages=messages, tools=tools)
    assert final.content
    assert final.stop_reason in ("end_turn", "tool_use", "model_context_window_exceeded")
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens


async def test_thinking_is_told_apart_in_responses(tiny_engine):
    """A model that always thinks first, and that is stopped thinking by its budget."""
    async with clients(tiny_engine, reasoning_parser="deepseek_r1") as (gpt, _):
        extra = {"thinking_token_budget": 6, "ignore_eos": True}
        request = {"model": "troupe", "input": "Hi", "temperature": 0, "max_output_tokens": 40, "extra_body": extra}
        whole = await gpt.responses.create(**request)
        events = [event async for event in await gpt.responses.create(stream=True, **request)]
        again = await gpt.responses.create(
            **request | {"input": [{"role": "user", "content": "Hi"}, *whole.output, {"role": "user", "content": "Oh"}]}
        )
    reasoning, message = whole.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert whole.usage.output_tokens_details.reasoning_tokens >= 6
    told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert told == reasoning.content[0].text != ""
    assert events[-1].response.output_text == message.content[0].text
    assert [item.type for item in again.output] == ["reasoning", "message"]


@pytest.mark.slow
async def test_thinking_is_told_apart_in_messages(tiny_engine):
    """As there; the API's smallest budget is 1,024 tokens."""
    body = {"temperature": 0, "ignore_eos": True}
    ask = {"model": "troupe", "max_tokens": 1100, "messages": [{"role": "user", "content": "Hi"}], "extra_body": body}
    budget = {"type": "enabled", "budget_tokens": 1024}
    async with clients(tiny_engine, reasoning_parser="deepseek_r1") as (_, claude):
        thought = await claude.messages.create(thinking=budget, **ask)
        async with claude.messages.stream(thinking=budget, **ask) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_message()
        omitted = await claude.messages.create(thinking=budget | {"display": "omitted"}, **ask)
        silent = await claude.messages.create(**ask)
    thinking, text = thought.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert thought.usage.output_tokens_details.thinking_tokens >= 1024
    assert {"thinking", "signature", "text"} <= kinds
    assert (streamed.content[0].thinking, streamed.content[0].signature) == (thinking.thinking, thinking.signature)
    assert [block.type for block in omitted.content] == ["thinking", "text"]
    assert omitted.content[0].thinking == ""
    assert all(block.type == "text" for block in silent.content), "it was not asked to think aloud"
