"""Rows B10 and B11 of the fault table where schemas come in other APIs' words, or as those of tools to be called.

`test_B_guides` has the chat API's and vLLM's own fields, and what compiling them may cost.
"""

from collections.abc import Callable
from typing import Any

import pytest

from troupellm.protocol.params.guide import GuideSpec
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.every_route import MESSAGES

pytestmark = pytest.mark.anyio

INSIDE: tuple[Any, ...] = (
    {"$ref": "https://example.com/x.json"}, {"type": "frog"}, {"not": {}}, {"$ref": "file:///etc/passwd"},
    {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}, {"minimum": "x"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
)  # fmt: skip
"""Impossible schemas, also as a part of another schema."""
WHOLE: tuple[Any, ...] = (
    *INSIDE,
    {"enum": []},
    False,
    {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(8)]} for i in range(12)]},
)


def with_argument(schema: Any) -> dict[str, Any]:
    """Schema of a tool that must be given what cannot be."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def chat_tool(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": with_argument(schema)}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def flat_tool(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "name": "f", "parameters": with_argument(schema)}
    return {"tools": [tool], "tool_choice": "required"}


def used_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": with_argument(schema)}], "tool_choice": {"type": "any"}}


def text_format(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


def output_format(schema: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
WAYS: list[tuple[str, Callable[[Any], dict[str, Any]], str, tuple[Any, ...]]] = [
    # path, what it is said with, what its error names, and which schemas are said
    ("/v1/responses", text_format, "text.format", WHOLE),
    ("/v1/messages", output_format, "output_config.format", WHOLE),
    ("/v1/chat/completions", chat_tool, "tools", INSIDE),
    ("/v1/responses", flat_tool, "tools", INSIDE),
    ("/v1/messages", used_tool, "tools", INSIDE),
]


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.slow)])
async def test_B10_B11_schemas_that_cannot_be_are_refused_in_the_words_of_each_api(tiny_engine, most):
    async with tiny_engine(tool_call_parser="hermes") as engine:
        first = GuideSpec(kind="choice", source='["a"]')
        await engine.generate([5], guide=first, max_tokens=2)
        async with under_attack(engine) as attacked:
            wrong = []
            for path, said, name, schemas in WAYS:
                for schema in schemas[:most]:
                    for stream in (False, True):
                        body = {"model": "tiny", "stream": stream} | BODIES[path] | said(schema)
                        answer = await attacked.client.post(path, json=body)
                        problem = refused(answer, name, anthropic=path == "/v1/messages")
                        wrong.append((path, str(schema)[:80], stream, problem))
            assert not [entry for entry in wrong if entry[3]]
        assert engine.snapshot().guide.refused > 0
        assert (await engine.generate([5], guide=first, max_tokens=2)).choices[0].text == "a"


def refused(answer: Any, name: str, *, anthropic: bool) -> str | None:
    if answer.status_code != 400:
        return f"{answer.status_code} {answer.text[:300]}"
    error = answer.json()["error"]
    told = error["message"] if anthropic else error["param"]
    if len(error["message"]) > 512 or "root:" in answer.text:
        return f"message {error}"
    return None if name in str(told) else f"it names {told}"
