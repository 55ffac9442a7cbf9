"""Answers of each kind on chat, responses and messages: whole, token by token and in random cuts they say the same.

The parsers' own tables (`tests/models/chat_parsers/`) have every case; here are those that an API could tell apart.
"""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.models.chat_parsers.catalog import REASONING_PARSERS
from troupellm.tests.support.chat.recorded_dialects import TOOLS
from troupellm.tests.support.chat.written_formats import FORMATS
from troupellm.tests.support.checkpoints.tiny_model import CHAT_TEMPLATE
from troupellm.tests.support.servers.serving import events_of, running_server
from troupellm.tests.support.workers.echo_worker import EchoWorker, write_echo_model

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TAGS = (
    "<tool_call>\n<function=send>\n<parameter=text>\nSTOP <b>\n</parameter>\n<parameter=to>\n"
    '["</parameter>", "x"]\n</parameter>\n</function>\n</tool_call>'
)
PARIS = ("get_weather", {"city": "Paris"})
SENT = ("send", {"text": "STOP <b>", "to": ["</parameter>", "x"]})
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
PRE_THOUGHT = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    parsers: tuple[str, str] = ("hermes", "qwen3")
    template: str | None = None
    stop: str = ""
    most: int = 400
    choice: str = "auto"
    """auto, required, or the name of a tool."""
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """Arguments that are a text never became JSON."""
    reason: str = "stop"


KINDS = {
    "thoughts, content and calls": Kind(
        text=f"<think>\nHm.\n</think>\n\nSo: {CALL}\n{CALL}", content="So:", reasoning="Hm.", calls=(PARIS, PARIS)
    ),
    "a stop string in thoughts, arguments and content": Kind(
        text=f"<think>\n1 STOP 2\n</think>\n\nyes {TAGS}\nno STOP more",
        parsers=("qwen3_coder", "qwen3"),
        stop="STOP",
        content="yes\nno",
        reasoning="1 STOP 2",
        calls=(SENT,),
    ),
    "a forced call in the form of its family": Kind(
        text=TAGS, parsers=("qwen3_coder", "none"), choice="required", calls=(SENT,)
    ),
    "a named call": Kind(text=CALL, parsers=("hermes", "none"), choice="get_weather", calls=(PARIS,)),
    "a call in open thoughts": Kind(
        text=f"Let me see. {CALL}", template=PRE_THOUGHT, reasoning="Let me see.", calls=(PARIS,)
    ),
    "a mark in the prose of thoughts": Kind(
        text="Use <tool_call> tags.\n</think>\n\nHi.",
        template=PRE_THOUGHT,
        reasoning="Use <tool_call> tags.",
        content="Hi.",
    ),
    "channels": Kind(text=HARMONY, parsers=("openai", "openai_gptoss"), reasoning="Hm.", calls=(PARIS,)),
    "a call that a limit cuts": Kind(text=CALL, most=45, calls=(("get_weather", ""),), reason="length"),
    "control characters": Kind(
        text='<tool_call>{"name": "send", "arguments": {"text": "a\n\tb"}}</tool_call>',
        calls=(("send", {"text": "a\n\tb"}),),
    ),
    "arguments without their last bracket": Kind(
        text='<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"</tool_call>', calls=(PARIS,)
    ),
    "wrapped arguments": Kind(
        text='<tool_call>{"name": "get_weather", "arguments": {"arguments": {"city": "Paris"}}}</tool_call>',
        calls=(PARIS,),
    ),
    "text around calls": Kind(text=f"First.\n{CALL}\nLast.", content="First.\nLast.", calls=(PARIS,)),
    "prose before a bare object": Kind(
        text='I look:\n{"name": "get_weather", "parameters": {"city": "Paris"}}',
        parsers=("llama3_json", "none"),
        content="I look:",
        calls=(PARIS,),
    ),
    "an unknown call": Kind(text='<tool_call>{"name": "unknown"}</tool_call>', calls=(("unknown", {}),)),
    "text only": Kind(text="Just text, é 🎉.", content="Just text, é 🎉."),
}
QUICK = ("a stop string in thoughts, arguments and content",)
FAMILIES = {f"{row.parser}-{place}": row for place, row in enumerate(FORMATS) if not row.suffix}
FUNCTIONS = [tool["function"] for tool in TOOLS]


class Answer(msgspec.Struct, frozen=True):
    content: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]
    reason: str


def chat_body(kind: Kind) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": kind.choice}}
    stop = {"stop": kind.stop} if kind.stop else {}
    return {
        "messages": [{"role": "user", "content": kind.text}],
        "max_tokens": kind.most,
        "tools": TOOLS,
        "tool_choice": kind.choice if kind.choice in ("auto", "required") else named,
    } | stop


def responses_body(kind: Kind) -> dict[str, Any]:
    named = {"type": "function", "name": kind.choice}
    stop = {"stop": kind.stop} if kind.stop else {}
    return {
        "input": kind.text,
        "max_output_tokens": kind.most,
        "store": False,
        "tools": [{"type": "function"} | function for function in FUNCTIONS],
        "tool_choice": kind.choice if kind.choice in ("auto", "required") else named,
    } | stop


def messages_body(kind: Kind) -> dict[str, Any]:
    choice = {"auto": {"type": "auto"}, "required": {"type": "any"}}.get(kind.choice)
    more: dict[str, Any] = {"stop_sequences": [kind.stop]} if kind.stop else {}
    if kind.reasoning:  # else it is not shown
        more["thinking"] = {"type": "adaptive"}
    return {
        "messages": [{"role": "user", "content": kind.text}],
        "max_tokens": kind.most,
        "tools": [{"name": tool["name"], "input_schema": tool.get("parameters", {})} for tool in FUNCTIONS],
        "tool_choice": choice or {"type": "tool", "name": kind.choice},
    } | more


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def of_chat(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], loaded(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    reason = choice["finish_reason"]
    return Answer(message["content"] or "", message.get("reasoning_content") or "", tuple(calls), reason)


def of_chat_stream(text: str) -> Answer:
    content, reasoning, calls, reason = "", "", dict[int, list[str]](), ""
    for event in events_of(text):
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            reasoning += choice["delta"].get("reasoning_content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(piece["index"], [piece["function"].get("name", ""), ""])
                call[1] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return Answer(content, reasoning, tuple((name, loaded(given)) for name, given in calls.values()), reason)


def of_response(answer: dict[str, Any]) -> Answer:
    items = answer["output"]
    content = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    thoughts = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
    calls = [(item["name"], loaded(item["arguments"])) for item in items if item["type"] == "function_call"]
    cut = answer["status"] == "incomplete"
    return Answer(content, thoughts, tuple(calls), "length" if cut else "stop")


def of_response_stream(text: str) -> Answer:
    """The last event has the response; what the deltas say is the same."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    answer = of_response(events[-1]["response"])
    said = {
        kind: "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        for kind in ("output_text", "reasoning_text", "function_call_arguments")
    }
    assert (said["output_text"], said["reasoning_text"]) == (answer.content, answer.reasoning)
    items = events[-1]["response"]["output"]
    whole = "".join(item["arguments"] for item in items if item["type"] == "function_call")
    assert said["function_call_arguments"] == whole
    return answer


def of_message(answer: dict[str, Any]) -> Answer:
    blocks = answer["content"]
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return Answer(content, thoughts, tuple(calls), answer["stop_reason"])


def of_message_stream(text: str) -> Answer:
    blocks: list[dict[str, Any]] = []
    reason = ""
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | ({"input": ""} if "input" in event["content_block"] else {}))
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for key, given in (("text", "text"), ("thinking", "thinking"), ("input", "partial_json")):
                    if given in delta:
                        block[key] += delta[given]
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    blocks = [block | {"input": loaded(block["input"] or "{}")} if "input" in block else block for block in blocks]
    return of_message({"content": blocks, "stop_reason": reason})


APIS = {
    "/v1/chat/completions": (chat_body, of_chat, of_chat_stream),
    "/v1/responses": (responses_body, of_response, of_response_stream),
    "/v1/messages": (messages_body, of_message, of_message_stream),
}
PARAMS = [pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", PARAMS)
async def test_every_cut_of_an_answer_says_the_same_on_every_api(tmp_path, name):
    kind = KINDS[name]
    async with echo(tmp_path / "echo", kind.parsers, kind.template) as client:
        for path in APIS:
            whole = await check(client, path, kind, 3 if name in QUICK else 25)
            assert (whole.content.strip(), whole.reasoning.strip()) == (kind.content, kind.reasoning), path
            assert [name for name, _ in whole.calls] == [name for name, _ in kind.calls]
            if kind.reason == "stop":
                assert whole.calls == kind.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_family_says_the_same_in_every_cut_on_every_api(tmp_path, name):
    """The line between content and thought depends on the family's own template, which is not served here."""
    row = FAMILIES[name]
    reasoning = row.reasoning or row.parser
    begin, end = row.thinks
    text = f"{begin}Let me look.{end}{row.wraps[0]}Looking now.{row.wraps[1]}{row.calls([PARIS, SENT])}"
    kind = Kind(text=text, most=2_000, reasoning="Let me look.")
    parsers = (row.parser, reasoning if reasoning in REASONING_PARSERS else "qwen3")
    async with echo(tmp_path / "echo", parsers, None) as client:
        answers = [await check(client, path, kind, 3) for path in APIS]
    for answer in answers:
        assert answer.calls == (PARIS, SENT)
        assert (answer.content, answer.reasoning) == (answers[0].content, answers[0].reasoning)


@asynccontextmanager
async def echo(folder: Path, parsers: tuple[str, str], template: str | None) -> AsyncIterator[httpx.AsyncClient]:
    write_echo_model(folder, template=template)
    tool_parser, reasoning_parser = parsers
    async with (
        Engine(
            str(folder),
            worker=EchoWorker,
            served_model_name=("echo",),
            tool_call_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            flush_interval=0.0,
            device="cpu",
        ) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        yield client


async def check(client: httpx.AsyncClient, path: str, kind: Kind, number: int) -> Answer:
    """The whole answer, which streams say in every cut too."""
    make, read, read_stream = APIS[path]
    body = {"model": "echo", "temperature": 0} | make(kind)
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: Answer = read(answer.json())
    source = random.Random(len(kind.text))
    for interval in (1, *(source.randrange(2, 40) for _ in range(number))):
        streamed = await client.post(path, json=body | {"stream": True, "stream_interval": interval})
        assert streamed.status_code == 200, streamed.text
        assert read_stream(streamed.text) == whole, (path, interval)
    return whole
