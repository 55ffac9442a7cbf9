"""Anthropic's requests as chat requests."""

import msgspec
import pytest

from troupellm.protocol.api.anthropic import CountTokensRequest, MessagesRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.messages.translate import translate
from troupellm.server.openai.chat_turn import tool_use_of

TOOL = {"name": "get", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


def chat(*, switches=("enable_thinking",), thinks=True, **fields):
    body = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "x"}]} | fields
    return translate(msgspec.convert(body, MessagesRequest), switches=switches, thinks=thinks).chat


def messages(given, **fields):
    return [without_nulls(msgspec.to_builtins(message)) for message in chat(messages=given, **fields).messages]


def without_nulls(value):
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return value


def test_a_coding_agents_history():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Fix it."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Let me look.", "signature": "Eq=="},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "print(1)", "cache_control": {"type": "ephemeral"}}],
                },
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no such command"},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [{"type": "text", "text": "You code."}, {"type": "text", "text": "Well.", "cache_control": {}}]
    first, user, assistant, one, two, last = messages(history, system=system)
    assert first == {"role": "system", "content": "You code.\n\nWell."}
    assert user["content"] == "<reminder>\n\nFix it."
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Let me look.")
    assert assistant["tool_calls"][0] == {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "Read", "arguments": '{"path":"a.py"}'},
    }
    assert one == {"role": "tool", "tool_call_id": "toolu_1", "content": "print(1)"}
    assert two == {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such command"}
    assert last == {"role": "user", "content": "Go on."}


def test_tool_uses_alone_have_no_content_and_results_may_be_empty():
    given = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ]
    assert messages(given)[1:] == [
        {
            "role": "assistant",
            "tool_calls": [{"id": "t", "type": "function", "function": {"name": "get", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "t", "content": ""},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn():
    """As this API has it: clients send them, and the templates of many models want turns to alternate."""
    uses = [{"type": "tool_use", "id": name, "name": "get", "input": {}} for name in "tu"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "tu"]
    given = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}]},
        *[{"role": "assistant", "content": [use]} for use in uses],
        {"role": "user", "content": [{"type": "text", "text": "f"}, results[0]]},
        {"role": "user", "content": [results[1]]},
        {"role": "user", "content": "g"},
        {"role": "assistant", "content": "h"},
        {"role": "assistant", "content": "i"},
    ]
    found = messages(given)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert [message["content"] for message in found] == ["a\n\nb\n\nc", "de", "t", "u", "f\n\ng", "hi"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["t", "u"]
    assert chat(messages=given).continue_final_message


def test_documents_that_are_text_are_read():
    part = {"type": "content", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    whole = {"type": "text", "media_type": "text/plain", "data": "three"}
    given = [{"role": "user", "content": [{"type": "document", "source": source} for source in (part, whole)]}]
    assert messages(given)[0]["content"] == "one\n\ntwo\n\nthree"


def test_tools_of_the_clients_own_are_kept_and_the_vendors_are_skipped():
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL, {"type": "custom", **TOOL, "name": "put"}]
    request = msgspec.convert(
        {"max_tokens": 1, "messages": [], "tools": tools, "tool_choice": {"type": "tool", "name": "put"}},
        MessagesRequest,
    )
    translated = translate(request, switches=(), thinks=False)
    kept = without_nulls(msgspec.to_builtins(translated.chat.tools))
    assert [tool["function"]["name"] for tool in kept] == ["get", "put"]
    assert kept[0]["function"]["parameters"] == TOOL["input_schema"]
    assert dict(translated.names)["tools[0].function.parameters"] == "tools[1].input_schema"
    assert translated.skipped == ["tool web_search_20250305"]


def test_blocks_of_the_vendors_own_tools_are_told_of():
    results = [{"type": "server_tool_use", "id": "s"}, {"type": "web_search_tool_result", "content": []}]
    given = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [*results, {"type": "text", "text": "y"}, results[0]]},
    ]
    request = msgspec.convert({"max_tokens": 1, "messages": given}, MessagesRequest)
    skipped = translate(request, switches=(), thinks=False).skipped
    assert skipped == ["block server_tool_use", "block web_search_tool_result"]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get"}, {"type": "function", "function": {"name": "get"}}),
    ],
)
def test_a_tool_choice_of_anthropic_becomes_that_of_openai(choice, wanted):
    assert without_nulls(msgspec.to_builtins(chat(tools=[TOOL], tool_choice=choice).tool_choice)) == wanted


def test_whether_tools_are_called_that_nobody_chose_is_left_to_the_server():
    assert chat(tools=[TOOL]).tool_choice is None
    quiet, asked = chat(tools=[TOOL]), chat(tools=[TOOL], tool_choice={"type": "auto"})
    assert [len(tool_use_of(request, automatic=False).tools) for request in (quiet, asked)] == [0, 1]
    assert len(tool_use_of(quiet).tools) == 1


def test_sampling_fields_of_anthropic_become_those_of_openai():
    request = chat(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], max_tokens=77)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 4)
    assert (request.stop, request.max_completion_tokens) == (["END"], 77)


def test_thinking_is_off_unless_it_is_asked_for():
    assert (chat().chat_template_kwargs, chat().include_reasoning) == ({"enable_thinking": False}, False)
    asked = chat(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (asked.chat_template_kwargs, asked.thinking_token_budget) == ({"enable_thinking": True}, 1024)
    assert asked.include_reasoning is True
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs == {"enable_thinking": True}
    mute = chat(thinking={"type": "enabled", "budget_tokens": 1024}, switches=(), thinks=False)
    assert (mute.chat_template_kwargs, mute.thinking_token_budget) == (None, None)


def test_output_format_is_a_response_format():
    schema = {"type": "object"}
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        assert chat(**fields).response_format["json_schema"]["schema"] == schema


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (user({"type": "image", "source": {"type": "base64"}}), "messages[0].content[0].type"),
        (user({"type": "document", "source": {"type": "base64"}}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({}), "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_refusals_name_the_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_counting_needs_no_max_tokens():
    body = {"model": "m", "messages": [], "thinking": {"type": "enabled", "budget_tokens": 5000}}
    translated = translate(msgspec.convert(body, CountTokensRequest), switches=(), thinks=True)
    assert translated.chat.thinking_token_budget == 5000


def prefilled(content, **fields):
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": content}], **fields)


@pytest.mark.parametrize("content", ['{"a":', [{"type": "text", "text": '{"a":'}]])
def test_the_assistants_text_at_the_end_is_gone_on_from(content):
    request = prefilled(content)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert request.messages[-1].content == '{"a":'
    assert chat().continue_final_message is None
    assert prefilled(content, thinking={"type": "adaptive"}, thinks=False).continue_final_message


@pytest.mark.parametrize("content", ["", []])
def test_nothing_to_go_on_from_is_an_answer_from_the_start(content):
    request = prefilled(content)
    assert ([message.role for message in request.messages], request.continue_final_message) == (["user"], None)


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        ("so ", {}, "messages[1].content"),
        ("\n", {}, "messages[1].content"),
        ([{"type": "tool_use", "id": "t", "name": "get", "input": {}}], {}, "messages[1].content"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}], {}, "messages[1].content"),
        ("so", {"thinking": {"type": "adaptive"}}, "thinking"),
        ("so", {"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ("so", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ],
)
def test_an_answer_that_cannot_be_continued_is_refused(content, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        prefilled(content, **fields)
    assert caught.value.param == param
