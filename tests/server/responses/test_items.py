"""Input items as chat messages."""

import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.responses.items import as_items, conversation_of
from troupellm.server.responses.sealed import sealed


def messages_of(items, instructions, **more):
    return conversation_of(items, instructions, **more).messages


def texts(*parts):
    return [{"type": "input_text", "text": part} for part in parts]


@pytest.mark.parametrize("empty", [None, "", []])
def test_nothing_is_an_empty_message(empty):
    assert messages_of(as_items(empty), None) == [{"role": "user", "content": ""}]


def test_a_text_and_messages_without_a_type():
    assert messages_of(as_items("Hi"), "Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": texts("b", "c")}]
    assert messages_of(items, None) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]


def test_parts_of_what_the_model_is_told_are_told_apart():
    call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": texts("one", "two")}
    items = [
        {"role": "developer", "content": texts("a", "b")},
        {"role": "user", "content": texts("c", "d")},
        {"role": "assistant", "content": texts("e", "f")},
        call,
        output,
    ]
    assert [message["content"] for message in messages_of(items, None)] == ["a\nb", "c\nd", "ef", "one\ntwo"]


def test_system_messages_at_the_start_are_one_and_later_ones_stay():
    items = [
        {"role": "developer", "content": "two"},
        {"role": "system", "content": "three"},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "late"},
    ]
    messages = messages_of(items, "one")
    assert messages[0] == {"role": "system", "content": "one\n\ntwo\n\nthree"}
    assert [message["role"] for message in messages] == ["system", "user", "system"]


def test_reasoning_text_and_calls_of_one_answer_are_one_message():
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"type": "function_call_output", "call_id": "c1", "output": texts("one")},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "Sun."},
    ]
    user, first, two, one, last = messages_of(items, None)
    assert user["role"] == "user"
    assert (first["content"], first["reasoning_content"]) == ("Wait.", "hm")
    assert [call["id"] for call in first["tool_calls"]] == ["c1", "c2"]
    assert first["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"a":1}'}
    assert two == {"role": "tool", "tool_call_id": "c2", "content": "two"}
    assert one["content"] == "one"
    assert last == {"role": "assistant", "content": "Sun.", "reasoning_content": "so"}


def test_hosted_tools_are_skipped_and_named_and_calls_of_client_tools_are_shown():
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "apply_patch_call", "call_id": "p1", "operation": {"type": "delete_file", "path": "x"}},
        {"type": "apply_patch_call_output", "call_id": "p1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    conversation = conversation_of(items, None)
    messages = conversation.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    calls = [message["tool_calls"][0]["function"] for message in messages[1::2]]
    assert [call["name"] for call in calls] == ["apply_patch", "apply_patch"]
    assert calls[1]["arguments"] == '{"input":"*** Begin"}'
    assert [message["content"] for message in messages[2::2]] == ["completed", "ok"]
    assert list(conversation.skipped) == ["item web_search_call", "item compaction", "item reasoning"]


def test_calls_of_functions_in_a_namespace_have_the_name_that_the_model_knows():
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c1", "namespace": "mcp__docs", "name": "search", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__mail__", "name": "search", "arguments": "{}"},
        {"type": "function_call", "call_id": "c3", "namespace": None, "name": "search", "arguments": "{}"},
    ]
    calls = messages_of(items, None)[1]["tool_calls"]
    names = [call["function"]["name"] for call in calls]
    assert names == ["mcp__docs__search", "mcp__mail__search", "search"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "nobody", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({}, "input[0].role"),
    ],
)
def test_refusals_name_the_item(item, param):
    with pytest.raises(InvalidRequest) as caught:
        messages_of([item], None)
    assert caught.value.param == param


def test_errors_count_from_the_requests_own_input():
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(InvalidRequest) as caught:
        messages_of([*past, {"role": "nobody"}], None, first=2)
    assert caught.value.param == "input[0].role"


class Counted(str):
    """A text that notes when it is copied behind another one, which makes many of them quadratic."""

    copied = 0

    def __radd__(self, before):
        Counted.copied += len(before)
        return Counted(str(before) + str(self))

    def __format__(self, spec):
        Counted.copied += len(self)
        return str(self)


@pytest.mark.parametrize(("role", "length"), [("assistant", 2_000 * 5), ("system", 2_000 * 7 - 2)])
def test_texts_are_put_together_once_however_many_items_they_come_in(role, length):
    Counted.copied = 0
    (message,) = messages_of([{"role": role, "content": Counted("word ")}] * 2_000, None)
    assert len(message["content"]) == length
    assert Counted.copied == 0


def test_all_packed_texts_of_a_conversation_share_one_room():
    own = {"encrypted_content": sealed("x" * 100)}
    items = [{"type": kind, **own} for kind in ("reasoning", "compaction")]
    made = conversation_of([*items, *items, {"role": "user", "content": "Hi"}], None, room=250)
    assert made.unpacked == 200
    assert list(made.skipped) == ["item reasoning", "item compaction"]
    assert len(made.messages) == 3
