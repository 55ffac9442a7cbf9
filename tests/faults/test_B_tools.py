"""Rows B8, B9 and B11 of the fault table as far as they are about tools and thoughts, with canaries."""

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.tests.support.chat.recorded_dialects import TOOLS
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.matrix import OK, check_matrix
from troupellm.tests.support.servers.serving import events_of
from troupellm.tests.support.workers.echo_worker import EchoWorker, write_echo_model

pytestmark = pytest.mark.anyio

CHAT = ("/v1/chat/completions",)


def _tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


WRONG = [
    ({"tools": [_tool(name="")]}, "tools[0].function.name"),
    ({"tools": [_tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [_tool(name="x" * 129)]}, "tools[0].function.name"),
    ({"tools": [_tool(name=f"f{i}") for i in range(1025)]}, "tools"),
    ({"tools": [_tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [_tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties"),
    ({"tools": [_tool(parameters="x")]}, "tools[0].function.parameters"),
    ({"tools": [_tool(description=3)]}, "tools[0].function.description"),
    ({"tools": [_tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": "x"}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [_tool()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [_tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [_tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": [_tool()], "tool_choice": "required", "structured_outputs": {"json_object": True}},
        "structured_outputs.json_object",
    ),
    ({"tools": [_tool(parameters={"$ref": "http://x/y"})], "tool_choice": "required"}, "tools"),
    ({"reasoning_effort": "endless"}, "reasoning_effort"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]
FINE = [
    {"tools": []},
    {"tools": None, "tool_choice": "auto"},
    {"tool_choice": "none"},
    {"tools": [_tool(), _tool(name="g", parameters=None, description=None)]},
    {"tools": [_tool(name=f"f{i}") for i in range(128)], "tool_choice": None},
    {"tools": [_tool(), _tool(description="the one that counts")]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
    {"tools": [_tool(name="a-b_c.d")], "parallel_tool_calls": None, "reasoning_effort": "high"},
    {"tools": [_tool(description="x" * 100_000)], "tool_choice": "none"},
    {"messages": [{"role": "assistant", "content": "x", "reasoning": "y"}, {"role": "user", "content": "z"}]},
]


async def test_B11_wrong_tools_are_refused_by_name(tiny_engine):
    async with tiny_engine(tool_call_parser="hermes") as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, [*WRONG, *[(fields, OK) for fields in FINE]], routes=CHAT)


async def test_B11_tools_that_are_too_many_too_long_and_too_deep(tiny_engine):
    deep: dict[str, object] = {"type": "object"}
    for _ in range(20):
        deep = {"type": "object", "properties": {"x": deep}}
    cases = [
        ({"tools": [_tool(name=f"f{i}") for i in range(1025)]}, "tools"),
        ({"tools": [_tool(description="x" * 2**20)]}, "tools"),
        ({"tools": [_tool(name=f"f{i}", description="x" * 20_000) for i in range(100)]}, "tools"),
        ({"tools": [_tool(parameters=deep)]}, "tools[0].function.parameters"),
        ({"messages": [{"role": "assistant", "tool_calls": [PAST] * 129}]}, OK),
    ]
    async with tiny_engine(tool_call_parser="hermes") as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


NOBODY = "no\x1b[31m\nbody" + "y" * 2**16
"""A name as a tool's is, and one that a log would obey."""
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USE = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            CHAT[0],
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [_tool()],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [_tool(), _tool(name=NOBODY)]},
                },
            },
            "tool_choice.allowed_tools.tools",
        ),
        (
            CHAT[0],
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [_tool()],
                "tool_choice": _tool(name=NOBODY),
            },
            "tool_choice",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [FLAT],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": NOBODY}],
                },
            },
            "tool_choice.tools[1].name",
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [FLAT], "tool_choice": {"type": "function", "name": NOBODY}},
            "tool_choice.name",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [USE],
                "tool_choice": {"type": "tool", "name": NOBODY},
                "max_tokens": 1,
            },
            "tool_choice.name",
        ),
    ],
    ids=["chat allows", "chat names", "responses allow", "responses name", "messages name"],
)
async def test_B11_choices_of_tools_that_are_not_there_say_field_and_name(tiny_engine, path, fields, param):
    async with tiny_engine(tool_call_parser="hermes") as engine, under_attack(engine) as attacked:
        answer = await attacked.client.post(path, json={"model": "tiny", **fields})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert param in message
    assert "no?[31m?body" in message
    assert len(message) <= 512


PAST = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_B8_results_without_a_call_and_calls_that_were_written_badly(tiny_engine):
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    call = {"role": "assistant", "content": None, "tool_calls": [PAST]}
    broken = {"role": "assistant", "tool_calls": [PAST | {"function": {"name": "f", "arguments": '{"a": '}}]}
    cases = [
        ({"messages": [result]}, OK),
        ({"messages": [call, result | {"tool_call_id": "b"}]}, OK),
        ({"messages": [call, result | {"content": None}]}, OK),
        ({"messages": [call, result]}, OK),
        ({"messages": [broken, result]}, OK),
    ]
    async with tiny_engine(tool_call_parser="hermes") as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


async def test_B9_chat_template_kwargs_set_no_reserved_names(tiny_engine):
    kwargs = "chat_template_kwargs"
    cases = [({kwargs: {name: True}}, kwargs) for name in ("tools", "messages", "__class__", "add_generation_prompt")]
    cases += [({kwargs: {"enable_thinking": {"a": 1}}}, kwargs)]
    cases += [({kwargs: {"enable_thinking": value}}, OK) for value in (True, False, None, "x", 3)]
    async with tiny_engine(reasoning_parser="qwen3") as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


NASTY = (
    "[now(), __import__('os').system('touch /tmp/x')]",
    '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 200,
    "<tool_call>" * 20,
    "[now(" * 40,
    '[TOOL_CALLS]now[ARGS]{"a": "' + "\\" * 100,
    "<|channel|>analysis<|message|>" * 8,
    '{"name": "now", "parameters": {"a": "${jndi:ldap://x}", "b": "{{ 7 * 7 }}", "c": "</script>"}}',
    "<function=now><parameter=" + "x" * 200,
)


@pytest.mark.parametrize(
    "parser",
    [pytest.param(name, marks=() if name == "llama4_pythonic" else pytest.mark.slow) for name in DISTINCT_PARSERS],
)
async def test_B11_output_that_looks_like_code_is_only_text(tmp_path, parser):
    """All text that the model writes is an answer: never an error, never run, and other requests go on."""
    folder = write_echo_model(tmp_path / "echo")
    settings = {"tool_call_parser": parser, "served_model_name": ("echo",), "device": "cpu", "flush_interval": 0.0}
    async with (
        Engine(str(folder), worker=EchoWorker, **settings) as engine,
        under_attack(engine, logprobs=False) as attacked,
    ):
        for text in NASTY:
            body = {"model": "echo", "messages": [{"role": "user", "content": text}], "tools": TOOLS}
            body |= {"max_tokens": 5000, "temperature": 0}
            whole = (await attacked.client.post(CHAT[0], json=body)).json()["choices"][0]
            assert whole["finish_reason"] in ("stop", "tool_calls")
            response = await attacked.client.post(CHAT[0], json=body | {"stream": True})
            deltas = [event["choices"][0]["delta"] for event in events_of(response.text)]
            content = "".join(delta.get("content") or "" for delta in deltas)
            assert content == (whole["message"]["content"] or "")
            pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", [])]
            calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
            assert [piece["name"] for piece in pieces if "name" in piece] == [call["name"] for call in calls]
            joined = "".join(piece["arguments"] for piece in pieces)
            assert joined == "".join(call["arguments"] for call in calls)


def test_B11_parsers_have_no_door_to_code():
    """They read text with regular expressions and JSON; nothing in them evaluates."""
    import troupellm.models.chat_parsers as package

    for path in package.__path__:
        for name in (
            "python_calls",
            "json_calls",
            "xml_calls",
            "parser",
            "harmony",
            "text_stream",
            "until_marker",
            "compiled_syntax",
            "json_text",
            "json_arguments",
            "form_reader",
            "pairs",
            "element_tags",
            "values",
            "python_literals",
            "unwrapped",
        ):
            with open(f"{path}/{name}.py", encoding="utf-8") as file:
                source = file.read()
            assert not any(word in source for word in ("eval(", "exec(", "import ast", "__import__", "pickle"))
