"""anthropic's client against the real server: its normal features, with its retries off."""

import json
from contextlib import asynccontextmanager

import anthropic
import anyio
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import http_request, running_server, server_config

pytestmark = pytest.mark.anyio

GREEDY = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0, "top_k": 5}}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
HI = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def sdk(engine, *, key="secret", token=None, **settings):
    async with (
        running_server(engine, server_config(api_key=("secret",), **settings)) as served,
        anthropic.AsyncAnthropic(
            base_url=served.url,
            api_key=key,
            auth_token=token,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS),
        ) as client,
    ):
        yield client


async def test_whole_and_streamed_say_the_same(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as client:
        whole = await client.messages.create(messages=HI, **GREEDY)
        events = [event async for event in await client.messages.create(messages=HI, stream=True, **GREEDY)]
        async with client.messages.stream(messages=HI, **GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert final.content[0].text == text == whole.content[0].text
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == whole.usage.input_tokens
    assert whole._request_id


async def test_a_key_comes_either_way(tiny_engine):
    async with tiny_engine() as engine:
        async with sdk(engine, key=None, token="secret") as client:
            await client.messages.create(messages=HI, **GREEDY)
        async with sdk(engine, key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(messages=HI, **GREEDY)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "authentication_error"


async def test_prompts_are_counted_as_they_are_used(tiny_engine):
    system = [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}]
    async with tiny_engine() as engine, sdk(engine) as client:
        count = await client.messages.count_tokens(model="tiny", messages=HI, system=system)
        made = await client.messages.create(messages=HI, system=system, **GREEDY)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="nobody", messages=HI)
    assert count.input_tokens == made.usage.input_tokens


async def test_stop_sequences_end_an_answer_and_are_named(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as client:
        whole = await client.messages.create(messages=HI, **GREEDY)
        stop = whole.content[0].text[3:5]
        cut = await client.messages.create(messages=HI, stop_sequences=[stop], **GREEDY)
        async with client.messages.stream(messages=HI, stop_sequences=[stop], **GREEDY) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    for message in (cut, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == whole.content[0].text.partition(stop)[0]
    assert "".join(event.text for event in events if event.type == "text") == cut.content[0].text
    (end,) = [event.delta for event in events if event.type == "message_delta"]
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", stop)


async def test_max_tokens_is_an_upper_bound(tiny_engine):
    async with tiny_engine(max_model_len=64) as engine, sdk(engine) as client:
        body = {"temperature": 0, "ignore_eos": True}
        made = await client.messages.create(model="tiny", max_tokens=16_000, messages=HI, extra_body=body)
        near = await client.messages.create(model="tiny", max_tokens=60, messages=HI, extra_body=body)
        long = [{"role": "user", "content": "x" * 100}]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="tiny", max_tokens=16_000, messages=long, extra_body=body)
    assert made.stop_reason == near.stop_reason == "model_context_window_exceeded"
    assert made.usage.input_tokens + made.usage.output_tokens == 64
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "temperature"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            anthropic.BadRequestError,
            "image",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_become_the_clients_own_classes(tiny_engine, fields, error, text, stream):
    async with tiny_engine() as engine, sdk(engine) as client:
        with pytest.raises(error) as caught:
            await client.messages.create(**{"messages": HI} | GREEDY | fields, stream=stream)
    assert set(caught.value.body) >= {"type", "error"}
    assert text in caught.value.body["error"]["message"]


async def test_what_is_skipped_is_named_in_the_answer(tiny_engine):
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    async with tiny_engine() as engine, sdk(engine) as client:
        whole = await client.messages.with_raw_response.create(messages=HI, tools=tools, **GREEDY)
        counted = await client.messages.with_raw_response.count_tokens(model="tiny", messages=HI, tools=tools)
        plain = await client.messages.with_raw_response.create(messages=HI, **GREEDY)
    assert whole.headers["x-troupellm-skipped"] == "tool web_search_20250305"
    assert counted.headers["x-troupellm-skipped"] == "tool web_search_20250305"
    assert "x-troupellm-skipped" not in plain.headers


async def test_a_full_waiting_room_is_an_overloaded_server(tiny_engine):
    hold = {"max_tokens": 4000, "ignore_eos": True}
    async with (
        tiny_engine(max_num_seqs=1, max_num_queued_reqs=1) as engine,
        sdk(engine) as client,
        engine.stream("runs", **hold) as running,
        engine.stream("waits", **hold),
    ):
        await anext(running)
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(messages=HI, **GREEDY)
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def connection_has_ping(seen):
    """As a chunk of its own."""
    return b"\r\n" + PING in seen


async def test_pings_keep_a_silent_stream_alive(tiny_engine):
    body = {"model": "tiny", "max_tokens": 4, "messages": HI, "stream": True}
    async with (
        tiny_engine(max_num_seqs=1) as engine,
        running_server(engine, server_config(sse_keep_alive_interval=0.05)) as served,
    ):
        connection = await served.raw(b"")
        async with engine.stream("hold", max_tokens=4000, ignore_eos=True) as held:
            await anext(held)
            await connection.stream.send(http_request("/v1/messages", body, connection="close"))
            async for _ in held:
                if connection_has_ping(connection.seen):
                    break
                with anyio.move_on_after(0.001):
                    connection.seen += await connection.stream.receive()
        seen = await connection.read_all()
        await connection.close()
    assert connection_has_ping(seen), "one of its own, beside that at the start"
    assert b": keep-alive" not in seen
    assert b"event: message_stop" in seen


@pytest.mark.parametrize("stream", [False, True])
async def test_edits_of_the_context_shorten_the_prompt_and_are_told(tiny_engine, stream):
    old = [
        {"role": "user", "content": "Ask"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x" * 500}]},
        {"role": "user", "content": "More"},
    ]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 100},
        "keep": {"type": "tool_uses", "value": 0},
    }
    body = {"model": "tiny", "messages": old, "context_management": {"edits": [edit]}}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        plain = await client.post("/v1/messages/count_tokens", json={"messages": old})
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        answer = await client.post("/v1/messages", json=body | {"max_tokens": 2, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert counted["context_management"] == {"original_input_tokens": plain.json()["input_tokens"]}
    cleared = plain.json()["input_tokens"] - counted["input_tokens"]
    assert cleared > 400
    told = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": cleared}
    if stream:
        (last,) = [line for line in answer.text.splitlines() if line.startswith('data: {"type":"message_delta"')]
        assert json.loads(last.removeprefix("data: "))["context_management"] == {"applied_edits": [told]}
        return
    message = answer.json()
    assert message["context_management"] == {"applied_edits": [told]}
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
