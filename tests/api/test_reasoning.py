"""Thoughts and tool calls of whole families over HTTP: what the model writes is what the test's user says."""

import json
from contextlib import asynccontextmanager

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.actors.llm.llm import LLM
from troupellm.protocol.params.outputs import ToolCall
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.chat.recorded_dialects import CASES, TOOLS, plain_calls
from troupellm.tests.support.checkpoints.tiny_model import CHAT_TEMPLATE
from troupellm.tests.support.servers.serving import events_of, running_server
from troupellm.tests.support.workers.echo_worker import EchoWorker, write_echo_model

pytestmark = pytest.mark.anyio

OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINKING_TEMPLATE = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + OFF + "{% endif %}")
SPECIAL = (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|tool_call|>", "<|python_tag|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|action_start|>", "<|action_end|>", "<|plugin|>",
)  # fmt: skip
THINK = ("<think>", "</think>")


@asynccontextmanager
async def echo(folder, **settings):
    settings = {
        "tool_call_parser": "none",
        "reasoning_parser": "none",
        "flush_interval": 0.0,
        "device": "cpu",
    } | settings
    async with (
        Engine(str(folder), worker=EchoWorker, served_model_name=("echo",), **settings) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        yield engine, client


def asking(text: str, **fields):
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "temperature": 0} | fields


async def whole(client, body):
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client, body):
    """Content, reasoning, calls, finish reason and usage of a stream, put together."""
    response = await client.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 200, response.text
    content, reasoning, calls, reason, usage = "", "", {}, None, None
    for event in events_of(response.text):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["type"] == "function"
                    assert piece["index"] == len(calls)
                    calls[piece["index"]] = [piece["id"], piece["function"]["name"], ""]
                calls[piece["index"]][2] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return content, reasoning, tuple(ToolCall(*calls[index]) for index in sorted(calls)), reason, usage


PARSERS = sorted({(case.tool_parser, case.reasoning_parser) for case in CASES if case.start == "free"})


@pytest.mark.parametrize("names", PARSERS, ids="-".join)
async def test_every_family_streamed_is_the_whole_answer_is_the_recorded_one(tmp_path, names):
    """With its marks as special tokens, which clients never see."""
    folder = write_echo_model(tmp_path / "echo", special=SPECIAL, added=THINK)
    async with echo(folder, tool_call_parser=names[0], reasoning_parser=names[1]) as (_, client):
        for case in CASES:
            if (case.tool_parser, case.reasoning_parser) != names or case.start != "free" or "<|return|>" in case.text:
                continue
            tools = {} if case.tool_parser == "none" else {"tools": TOOLS}
            body = asking(case.text, max_tokens=1000, **tools)
            answer = (await whole(client, body))["choices"][0]
            message = answer["message"]
            calls = tuple(
                ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", [])
            )
            assert plain_calls(calls, case.calls) == list(case.calls), case.name
            assert message.get("reasoning_content") == message.get("reasoning") == case.reasoning, case.name
            assert message["content"] == case.content, case.name
            in_arguments = any(isinstance(arguments, str) for _, arguments in case.calls)  # where the text ends
            assert answer["finish_reason"] == ("tool_calls" if calls and not in_arguments else "stop"), case.name
            content, reasoning, pieces, reason, _ = await streamed(client, body)
            assert (content, reasoning) == (case.content or "", case.reasoning or ""), case.name
            assert [(c.name, c.arguments) for c in pieces] == [(c.name, c.arguments) for c in calls], case.name
            assert reason == answer["finish_reason"]


async def test_thoughts_are_counted_switched_off_and_left_out(tmp_path):
    folder = write_echo_model(tmp_path / "echo", added=THINK, template=THINKING_TEMPLATE)
    async with echo(folder, reasoning_parser="auto") as (engine, client):
        assert engine.chat_format.chat_syntax.thinking is not None
        body = asking("<think>12345</think>\n\nyes", max_tokens=100)
        answer = await whole(client, body)
        assert answer["choices"][0]["message"] == {
            "role": "assistant",
            "content": "yes",
            "refusal": None,
            "reasoning": "12345",
            "reasoning_content": "12345",
        }
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        content, reasoning, _, _, usage = await streamed(client, body)
        assert (content, reasoning) == ("yes", "12345")
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
        hidden = body | {"include_reasoning": False}
        answer = await whole(client, hidden)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        assert (await streamed(client, hidden))[:2] == ("yes", "")
        for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            # The prompt has closed the thoughts already, so this is an answer that talks about them.
            answer = await whole(client, body | off)
            assert answer["choices"][0]["message"]["content"] == "<think>12345</think>\n\nyes"
        assert (await whole(client, body | {"reasoning_effort": "low"}))["choices"][0]["message"]["content"] == "yes"
        cut = await whole(client, body | {"max_tokens": 4})
        assert cut["choices"][0]["message"]["content"] is None
        assert (cut["choices"][0]["message"]["reasoning"], cut["choices"][0]["finish_reason"]) == ("123", "length")


async def test_thoughts_that_the_prompt_begins_go_on_in_the_answer(tmp_path):
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    folder = write_echo_model(tmp_path / "echo", added=THINK, template=template)
    async with echo(folder, reasoning_parser="auto") as (_, client):
        answer = await whole(client, asking("hm</think>yes", max_tokens=100))
        assert answer["choices"][0]["message"]["reasoning"] == "hm"
        assert answer["choices"][0]["message"]["content"] == "yes"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_thoughts_of_the_past_reach_the_template(tmp_path):
    template = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    folder = write_echo_model(tmp_path / "echo", template=template)
    async with echo(folder) as (_, client):
        counts = []
        for field in ("reasoning", "reasoning_content", "other"):
            past = {"role": "assistant", "content": "yes", field: "because"}
            request = {"messages": [past, {"role": "user", "content": "x"}]}
            counts.append((await client.post("/tokenize", json=request)).json()["count"])
    assert counts == [counts[2] + len("because")] * 2 + [counts[2]]


async def test_parallel_calls_may_be_forbidden(tmp_path):
    folder = write_echo_model(tmp_path / "echo")
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    async with echo(folder, tool_call_parser="hermes") as (_, client):
        body = asking(call * 3, max_tokens=1000, tools=TOOLS)
        both = (await whole(client, body))["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in both] == ["now"] * 3
        assert len({call["id"] for call in both}) == 3
        one = (await whole(client, body | {"parallel_tool_calls": False}))["choices"][0]["message"]["tool_calls"]
        assert len(one) == 1
        assert len((await streamed(client, body | {"parallel_tool_calls": False}))[2]) == 1


async def test_ids_have_the_shape_of_their_family(tmp_path):
    folder = write_echo_model(tmp_path / "echo")
    async with echo(folder, tool_call_parser="mistral") as (_, client):
        body = asking("[TOOL_CALLS]now[ARGS]{}", max_tokens=100, tools=TOOLS)
        (call,) = (await whole(client, body))["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


async def test_a_tool_call_cut_by_the_limit_says_so(tmp_path):
    folder = write_echo_model(tmp_path / "echo")
    async with echo(folder, tool_call_parser="hermes") as (_, client):
        text = '<tool_call>{"name": "send", "arguments": {"text": "hello"}}</tool_call>'
        body = asking(text, max_tokens=len('<tool_call>{"name": "send", "arguments": {"text": "he'), tools=TOOLS)
        answer = (await whole(client, body))["choices"][0]
        assert answer["finish_reason"] == "length"
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"text": "he'
        assert (await streamed(client, body))[3] == "length"


async def test_log_probabilities_and_ids_of_hidden_tokens_are_there(tmp_path):
    folder = write_echo_model(tmp_path / "echo")
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    async with echo(folder, tool_call_parser="hermes") as (engine, client):
        body = asking(text, max_tokens=1000, tools=TOOLS, return_token_ids=True)
        answer = (await whole(client, body))["choices"][0]
        response = await client.post("/v1/chat/completions", json=body | {"stream": True})
        ids = [token for event in events_of(response.text) for token in event["choices"][0].get("token_ids", [])]
        assert ids == answer["token_ids"]
        assert engine.tokenizer.decode(ids) == text


async def test_an_embedded_engine_parses_too(tmp_path):
    folder = write_echo_model(tmp_path / "echo", added=THINK)
    text = '<think>hm</think>ok <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "device": "cpu"}
    async with Engine(str(folder), worker=EchoWorker, **settings) as engine:
        messages = [{"role": "user", "content": text}]
        async with engine.chat(messages, tools=TOOLS, max_tokens=1000, streaming=False) as stream:
            completion = await stream.collect()
        message = completion.choices[0].message
        assert (message.content, message.reasoning, message.tool_calls[0].name) == ("ok", "hm", "now")
        assert completion.usage.reasoning_tokens == 2
        async with engine.chat(messages, tools=TOOLS, max_tokens=1000) as stream:
            pieces = [event.piece async for events in stream.turn() for event in events]
        assert "".join(piece.text for piece in pieces if type(piece).__name__ == "Content") == "ok"
        assert json.loads("".join(p.text for p in pieces if type(p).__name__ == "CallArguments")) == {}
        async with engine.chat(messages, max_tokens=1000) as stream:
            assert "".join([delta.text async for delta in stream]) == text


def test_offline_chats_have_messages(tmp_path):
    folder = write_echo_model(tmp_path / "echo", added=THINK)
    conversation = [{"role": "user", "content": '<think>hm</think><tool_call>{"name": "now"}</tool_call>'}]
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "device": "cpu"}
    with LLM(str(folder), worker=EchoWorker, **settings) as llm:
        params = SamplingParams(max_tokens=1000, temperature=0)
        outputs = llm.chat([conversation] * 2, [params, params], use_tqdm=False, tools=TOOLS)
        (plain,) = llm.chat(conversation, params, use_tqdm=False, tools=TOOLS, tool_choice="none")
    for output in outputs:
        message = output.outputs[0].message
        assert (message.content, message.reasoning) == (None, "hm")
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("now", "{}")]
    assert plain.outputs[0].message.content == '<tool_call>{"name": "now"}</tool_call>'


async def test_stop_strings_end_the_content_and_not_the_thoughts(tmp_path):
    folder = write_echo_model(tmp_path / "echo", added=THINK, template=THINKING_TEMPLATE)
    async with echo(folder, reasoning_parser="qwen3") as (_, client):
        body = asking("<think>1 STOP 2</think>\n\nyes STOP no", max_tokens=100, stop=["STOP"])
        answer = (await whole(client, body))["choices"][0]
        assert answer["message"]["reasoning_content"] == "1 STOP 2"
        assert answer["message"]["content"] == "yes "
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "STOP")
        content, reasoning, _, reason, _ = await streamed(client, body)
        assert (content, reasoning, reason) == ("yes ", "1 STOP 2", "stop")
