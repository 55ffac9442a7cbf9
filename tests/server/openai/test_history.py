"""Histories that are read on the event loop, those too long for it, and odd messages."""

import msgspec
import pytest

from troupellm.protocol.api.chat import ChatMessage, ChatRequest
from troupellm.server.openai.chat_turn import (
    INLINE_LETTERS,
    INLINE_PARTS,
    INLINE_TOOLS,
    has_long_tools,
    has_many_parts,
)
from troupellm.server.openai.past_messages import plain_messages

MESSAGES = [{"role": "user", "content": "x" * 2 * INLINE_LETTERS}]
LONG_TEXT = {"type": "object", "properties": {"a": {"enum": ["x" * INLINE_LETTERS]}}}
LONG_LIST = {"enum": list(range(INLINE_LETTERS // 8))}
LONG_NAMES = {"properties": {f"name of a property {number}": True for number in range(2000)}}


def is_long(**fields: object) -> bool:
    request = msgspec.convert({"messages": MESSAGES} | fields, ChatRequest)
    return has_long_tools(request, request.messages)


def tool(schema: object = None, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": schema} | more}


def test_short_histories_are_read_at_once():
    assert not is_long()
    assert not is_long(tools=[tool({"type": "object", "properties": {"a": {"type": "string"}}})] * INLINE_TOOLS)
    assert not is_long(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}})


def test_few_messages_of_few_parts_are_read_at_once():
    message = msgspec.convert({"role": "user", "content": [{"type": "text", "text": "x"}] * 8}, ChatMessage)
    assert not has_many_parts([message] * (INLINE_PARTS // 8))
    assert has_many_parts([message] * (INLINE_PARTS // 8 + 1))
    assert has_many_parts([ChatMessage(role="user", content="x")] * (INLINE_PARTS + 1))


@pytest.mark.parametrize("schema", [LONG_TEXT, LONG_LIST, LONG_NAMES], ids=["text", "list", "names"])
def test_schemas_count_by_what_they_hold(schema: object):
    assert is_long(tools=[tool(schema)])
    assert is_long(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert is_long(structured_outputs={"json": schema})
    assert is_long(guided_json=schema)


def test_long_descriptions_choices_and_many_tools_count_as_long():
    assert is_long(tools=[tool(description="x" * INLINE_LETTERS)])
    assert is_long(guided_choice=["yes"] * INLINE_LETTERS)
    assert is_long(tools=[tool({})] * (INLINE_TOOLS + 1))
    assert is_long(tools=[tool({"description": "x" * (INLINE_LETTERS // 8)})] * 8)


def test_an_answer_without_content_is_an_empty_text():
    """Templates would write null as a word."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "reasoning_content": "so"}]
    request = msgspec.convert({"messages": messages}, ChatRequest)
    assert plain_messages(request.messages).messages[1]["content"] == ""


def test_halves_of_characters_in_past_calls_are_shown_as_what_they_are():
    """A model has spelt them, and no prompt can hold them: without this its conversation could not go on."""
    spelt = r'{"city": "a\ud83d", "\uDC00": [{"x": "\ud83d\ude00"}], "path": "\\ud800", "n": 1e2}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": spelt}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    request = msgspec.convert({"messages": messages}, ChatRequest)
    shown = plain_messages(request.messages).messages[1]["tool_calls"][0]["function"]["arguments"]
    assert shown == {"city": "a\ufffd", "\ufffd": [{"x": "\U0001f600"}], "path": r"\ud800", "n": 100.0}
    assert str(shown).encode()
