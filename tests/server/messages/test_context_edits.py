"""Edits of `context_management`: what they clear, when they are applied, and what they say of it."""

import json

import msgspec
import pytest

from troupellm.protocol.api.anthropic import CountTokensRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.messages.context_edits import CLEARED, Edited, Work, edited

pytestmark = pytest.mark.anyio

SOON = {"trigger": {"type": "tool_uses", "value": 1}}
TOOLS, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def thought(text: str) -> dict:
    return {"type": "thinking", "thinking": text, "signature": ""}


def talk(calls: int, reasoning: bool = True) -> list[dict]:
    """A turn of the user for each two calls; call i is of tool f or g."""
    messages = []
    for number in range(calls):
        if number % 2 == 0:
            messages.append({"role": "user", "content": f"ask {number}"})
        use = {"type": "tool_use", "id": f"t{number}", "name": "fg"[number % 2], "input": {"a": number}}
        messages.append({"role": "assistant", "content": [*([thought("hm")] if reasoning else []), use]})
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "x" * 100}
        messages.append({"role": "user", "content": [result]})
    return messages


async def edit(messages: list[dict], *edits: dict) -> Edited:
    return await edited(asked(messages, *edits), count, read)


def asked(messages: list[dict], *edits: dict) -> CountTokensRequest:
    body = {"messages": messages, "context_management": {"edits": list(edits)}}
    return msgspec.convert(body, CountTokensRequest)


async def count(request: CountTokensRequest) -> int:
    return len(json.dumps(msgspec.to_builtins(request.messages)))


async def read(work: Work) -> object:
    return work()


def results(made: Edited) -> list[str]:
    blocks = [block for message in made.request.messages for block in message.content if isinstance(block, dict)]
    return ["-" if block["content"] == CLEARED else "+" for block in blocks if block["type"] == "tool_result"]


def reasoning(made: Edited) -> str:
    """Which messages of the assistant have thoughts."""
    answers = [message.content for message in made.request.messages if message.role == "assistant"]
    return "".join("+" if any(block["type"] == "thinking" for block in answer) else "-" for answer in answers)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, "++++++"),  # too few tokens
        ({"trigger": {"type": "input_tokens", "value": 10}}, "---+++"),
        ({"trigger": {"type": "tool_uses", "value": 5}}, "---+++"),
        ({"trigger": {"type": "tool_uses", "value": 6}}, "++++++"),
        (SOON | {"keep": {"type": "tool_uses", "value": 0}}, "------"),
        (SOON | {"keep": {"type": "tool_uses", "value": 5}}, "-+++++"),
        (SOON | {"exclude_tools": ["f"]}, "+-++++"),
        (SOON | {"clear_at_least": {"type": "input_tokens", "value": 100}}, "---+++"),
        (SOON | {"clear_at_least": {"type": "input_tokens", "value": 999}}, "++++++"),
    ],
)
async def test_results_of_old_calls_are_cleared(fields: dict, left: str) -> None:
    made = await edit(talk(6), {"type": TOOLS} | fields)
    assert "".join(results(made)) == left
    number = left.count("-")
    assert [entry.cleared_tool_uses for entry in made.applied] == ([number] if number else [])
    assert all(entry.cleared_input_tokens == number * (100 - len(CLEARED)) for entry in made.applied)


async def test_a_result_belongs_to_the_newest_call_before_it_with_its_id() -> None:
    messages = talk(4, reasoning=False)
    for message in messages:
        for block in message["content"] if isinstance(message["content"], list) else []:
            block["id" if block["type"] == "tool_use" else "tool_use_id"] = "call_0"
    made = await edit(messages, {"type": TOOLS} | SOON | {"keep": {"type": "tool_uses", "value": 2}})
    assert "".join(results(made)) == "--++"
    assert [entry.cleared_tool_uses for entry in made.applied] == [2]


@pytest.mark.parametrize("name", [["x"], {}, 7, None])
async def test_a_result_whose_id_is_no_text_stays(name: object) -> None:
    messages = talk(4, reasoning=False)
    messages[1]["content"][0]["id"] = messages[2]["content"][0]["tool_use_id"] = name
    made = await edit(messages, {"type": TOOLS} | SOON | {"keep": {"type": "tool_uses", "value": 1}})
    assert "".join(results(made)) == "+--+"


@pytest.mark.parametrize(("inputs", "left"), [(None, [0, 1]), (True, []), (["g"], [0])])
async def test_arguments_of_cleared_calls_stay_unless_they_are_to_go(inputs: object, left: list[int]) -> None:
    fields = {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 0}}
    made = await edit(talk(2), {"type": TOOLS, "clear_tool_inputs": inputs} | fields)
    blocks = [block for message in made.request.messages for block in message.content if isinstance(block, dict)]
    assert [block["input"]["a"] for block in blocks if block["type"] == "tool_use" and block["input"]] == left


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, "----++"),
        ({"type": "thinking_turns", "value": 2}, "--++++"),
        ({"type": "thinking_turns", "value": 0}, "------"),
        ({"type": "thinking_turns", "value": 9}, "++++++"),
        ("all", "++++++"),
    ],
)
async def test_thoughts_of_old_turns_are_cleared(keep: object, left: str) -> None:
    made = await edit(talk(6), {"type": THINKING, "keep": keep})
    assert reasoning(made) == left
    assert [entry.cleared_thinking_turns for entry in made.applied] == ([left.count("-") // 2] if "-" in left else [])


async def test_several_edits_are_applied_in_their_order() -> None:
    tools = {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 1}}
    made = await edit(talk(6), {"type": THINKING}, tools)
    assert [entry.type for entry in made.applied] == [THINKING, TOOLS]
    whole = len(json.dumps(talk(6)))
    assert made.tokens_before == whole
    left = len(json.dumps(msgspec.to_builtins(made.request.messages)))
    assert sum(entry.cleared_input_tokens for entry in made.applied) == whole - left
    assert made.tokens == left


async def test_each_prompt_is_counted_once() -> None:
    counted = []

    async def noted(request: CountTokensRequest) -> int:
        counted.append(await count(request))
        return counted[-1]

    made = await edited(asked(talk(6), {"type": THINKING}, {"type": TOOLS} | SOON), noted, read)
    assert (made.tokens_before, made.tokens) == (counted[0], counted[2])
    assert len(counted) == 3


@pytest.mark.parametrize("kind", [TOOLS, THINKING, "compact_20260112"])
async def test_two_edits_of_a_type_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await edit(talk(2), {"type": kind}, {"type": kind})
    assert caught.value.param == "context_management.edits"


async def test_an_edit_of_an_unknown_type_is_noted() -> None:
    made = await edit(talk(2), {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 5}})
    assert (made.applied, made.skipped) == ([], ["edit compact_20260112"])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": TOOLS, "trigger": {"type": "turns", "value": 1}}, "trigger.type"),
        ({"type": TOOLS, "keep": {"type": "thinking_turns", "value": 1}}, "keep.type"),
        ({"type": TOOLS, "keep": "all"}, "keep"),
        ({"type": TOOLS, "clear_at_least": {"type": "tool_uses", "value": 1}}, "clear_at_least.type"),
        ({"type": THINKING, "keep": {"type": "tool_uses", "value": 1}}, "keep.type"),
        ({"type": THINKING, "keep": "none"}, "keep"),
    ],
)
async def test_wrong_edits_are_refused_by_name(given: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await edit(talk(2), given)
    assert caught.value.param == f"context_management.edits[0].{param}"
