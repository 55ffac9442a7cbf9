"""Past items of each API as messages, the names of the skipped ones, and the refused faults of the newest turn."""

import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.openai.chat_turn import tool_use_of
from troupellm.server.openai.past_messages import plain_messages
from troupellm.tests.support.chat.transcripts import CHAT_KINDS, MESSAGES_KINDS, RESPONSES_KINDS, answer, chat_of, user

IMAGE = "[image omitted: this model reads text only]"


def read(api, entries, **more):
    """The messages that a template gets, in short, and the names of the skipped parts."""
    request, skipped = chat_of(api, entries, **more)
    plain = plain_messages(request.messages)
    return [short(message) for message in plain.messages], [*skipped, *plain.skipped]


def short(message):
    content = message["content"]
    text = content if isinstance(content, str) else [part["text"] for part in content]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content")
    return (message["role"], text, *([calls] if calls else []), *([f"({reasoning})"] if reasoning else []))


@pytest.mark.parametrize(
    ("kind", "shown", "skipped"),
    [
        ("arguments are an object", [("assistant", "", [("look", {"a": "x"})]), ("tool", "found")], []),
        ("arguments are empty", [("assistant", "", [("look", {})]), ("tool", "found")], []),
        ("arguments are null", [("assistant", "", [("look", {})]), ("tool", "found")], []),
        ("arguments are no JSON", [("assistant", "", [("look", '{"a": ')]), ("tool", "found")], []),
        ("arguments are a list", [("assistant", "", [("look", "[1, 2]")]), ("tool", "found")], []),
        ("result without a call", [("user", "Result of an earlier call: found")], ["result without_call"]),
        ("call without an id", [("assistant", "", [("look", "{")]), ("tool", "found")], []),
        (
            "image in a result",
            [("assistant", "", [("look", {})]), ("tool", [IMAGE, "seen"])],
            ["part image_url"],
        ),
        (
            "image of the user",
            [("user", [IMAGE, "[audio omitted: this model reads text only]", "look"]), ("assistant", "answer")],
            ["part image_url", "part input_audio"],
        ),
        ("function call of old", [("assistant", "", [("look", {})]), ("tool", "found")], []),
        ("custom call", [("assistant", "", [("patch", {"input": "x"})]), ("tool", "found")], []),
        ("unknown call", [("assistant", "")], ["call strange", "call ?"]),
        ("spoken answer", [("assistant", "[audio omitted: this model reads text only]")], ["message audio"]),
        ("refusal", [("assistant", "no")], []),
        ("parts of other APIs", [("assistant", ["so"])], ["part odd", "part int"]),
        ("unknown role", [("user", "x"), ("assistant", "answer")], ["message wizard"]),
        ("reasoning", [("assistant", "answer", "(why)")], []),
        ("reasoning as a part", [("assistant", ["so"], "(why)")], []),
    ],
)
def test_past_chat_messages_are_shown_or_skipped_by_name(kind, shown, skipped):
    assert read("chat", [*CHAT_KINDS[kind], user()]) == ([*shown, ("user", "question")], skipped)


@pytest.mark.parametrize(
    ("kind", "shown", "skipped"),
    [
        ("function call", [("assistant", "", [("look", {})]), ("tool", "")], []),
        ("call without a name", [("assistant", "", [("unnamed", {})])], []),
        ("output without a call", [("user", "Result of an earlier call: found")], ["result without_call"]),
        (
            "image in an output",
            [("assistant", "", [("look", {})]), ("tool", f"{IMAGE}\nseen")],
            ["part input_image"],
        ),
        ("reasoning", [("assistant", "", "(why)")], []),
        ("reasoning of ours", [("assistant", "", "(why)")], []),
        ("reasoning of a summary", [("assistant", "", "(why)")], []),
        ("reasoning of others", [], ["item reasoning"]),
        ("reasoning that is damaged", [], ["item reasoning"]),
        ("agent reasoning", [("assistant", "", "(why)")], []),
        (
            "tool search",
            [("assistant", "", [("tool_search", {"query": "x"})]), ("tool", "Tools found: found_one")],
            [],
        ),
        ("wrong configuration", [], ["configuration effort", "configuration format"]),
        (
            "agent message",
            [("user", "Message from a to b: x"), ("user", "Message from ? to ?: plain")],
            ["item agent_message"],
        ),
        ("custom call", [("assistant", "", [("patch", {"input": "x"})]), ("tool", "ok")], []),
        ("local shell call", [("assistant", "", [("local_shell", {"command": ["ls"]})]), ("tool", "a")], []),
        ("shell call", [("assistant", "", [("shell", {"commands": ["ls"]})]), ("tool", "a\nexit code 0")], []),
        (
            "apply patch call",
            [("assistant", "", [("apply_patch", {"type": "delete_file", "path": "x"})]), ("tool", "completed")],
            [],
        ),
        ("mcp call", [("assistant", "", [("search", {})]), ("tool", "found")], []),
        ("compaction of ours", [("user", "Summary so far: much was said")], []),
        ("compaction of others", [], ["item compaction", "item context_compaction"]),
        ("unknown", [], ["item brand_new"]),
        ("unknown with a text", [("user", "hear me")], []),
        ("reference to nothing", [], ["item item_reference"]),
    ],
)
def test_past_response_items_are_shown_or_skipped_by_name(kind, shown, skipped):
    assert read("responses", [*RESPONSES_KINDS[kind], user()]) == ([*shown, ("user", "question")], skipped)


@pytest.mark.parametrize(
    ("kind", "shown", "skipped"),
    [
        ("input is a text", [("assistant", "", [("look", "no object")]), ("tool", "found"), ("user", "question")], []),
        (
            "result without a use",
            [("user", "Result of an earlier call: found"), ("user", "question")],
            ["result without_call"],
        ),
        ("use without an id", [("assistant", "", [("look", {"a": "x"})]), ("tool", "found"), ("user", "question")], []),
        (
            "image in a result",
            [
                ("assistant", "", [("look", {"a": "x"})]),
                ("tool", f"{IMAGE}\n\n[file omitted: this model reads text only]\n\nseen"),
                ("user", "question"),
            ],
            ["block image", "block document"],
        ),
        ("image of the user", [("user", IMAGE), ("assistant", "answer"), ("user", "question")], ["block image"]),
        (
            "tool addition",
            [
                ("system", "The tool further is now available.\n\nThe tool look is no longer available."),
                ("user", "question"),
            ],
            ["tool definition"],
        ),
        (
            "mcp tool use",
            [("assistant", "", [("search", {})]), ("tool", "found"), ("assistant", "so"), ("user", "question")],
            [],
        ),
        ("compaction", [("assistant", "much was said"), ("user", "question")], []),
        ("compaction that is empty", [("assistant", ""), ("user", "question")], ["block compaction"]),
        ("unknown block", [("assistant", ""), ("user", "question")], ["block brand_new", "block int", "block text"]),
        ("hosted tool", [("assistant", ""), ("user", "question")], ["block server_tool_use"]),
    ],
)
def test_past_message_blocks_are_shown_or_skipped_by_name(kind, shown, skipped):
    found = read("messages", [*MESSAGES_KINDS[kind], user()])
    assert (found[0], found[1][: len(skipped)]) == (shown, skipped)


def test_ids_are_by_position_where_a_client_sends_none():
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    entries = [
        answer() | {"tool_calls": [call, call]},
        *[{"role": "tool", "content": text} for text in ("one", "two", "three")],
    ]
    request, _ = chat_of("chat", entries)
    plain = plain_messages(request.messages)
    assert [message.get("tool_call_id") for message in plain.messages] == [None, "call_0_0", "call_0_1", None]
    assert plain.messages[3]["content"] == "Result of an earlier call: three"


@pytest.mark.parametrize(
    ("api", "content", "param"),
    [
        ("chat", [{"type": "image_url", "image_url": {"url": "x"}}], "messages[2].content[0]"),
        ("chat", None, "messages[2].content"),
        ("responses", [{"type": "input_image", "image_url": "x"}], "input[2].content[0].type"),
        ("responses", None, "input[2].content"),
        ("messages", [{"type": "image", "source": {}}], "messages[2].content[0].type"),
        ("messages", None, "messages[2].content"),
    ],
)
def test_only_the_newest_message_of_the_user_is_refused_for_what_it_holds(api, content, param):
    wrong = user() | {"content": content}
    with pytest.raises(InvalidRequest) as caught:
        read(api, [user(), answer(), wrong])
    assert caught.value.param == param
    shown, skipped = read(api, [user(), answer(), wrong, answer(), user()])
    assert bool(skipped) == (content is not None)
    assert shown[-1] == ("user", "question")


def test_an_image_behind_the_results_of_tools_is_a_part_of_them():
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    entries = [user(), answer("") | {"tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "seen"}]
    seen = {"role": "user", "content": [{"type": "text", "text": "Attached:"}, image]}
    shown, skipped = read("chat", [*entries, seen])
    assert shown[-1][0] == "user"
    assert "[image omitted: this model reads text only]" in shown[-1][1]
    assert skipped == ["part image_url"]


def test_effort_and_format_are_those_of_the_last_configuration():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    update = {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": {"format": form}}
    first, _ = chat_of("responses", [update, user()], reasoning={"effort": "low"})
    assert (first.reasoning_effort, first.response_format["type"]) == ("high", "json_schema")
    second, _ = chat_of("responses", [update, *RESPONSES_KINDS["configuration"], user()])
    assert (second.reasoning_effort, second.response_format) == ("low", None)


def names_of(request):
    return [tool["function"]["name"] for tool in tool_use_of(request).tools]


def test_tools_of_the_conversation_join_those_of_the_request():
    further = [*RESPONSES_KINDS["additional tools"], *RESPONSES_KINDS["tool search"]]
    request, skipped = chat_of("responses", [*further, user()])
    assert names_of(request) == ["look", "further", "found_one"]
    assert skipped == ["tool definition"]
    added = {"type": "tool_definition", "definition": {"name": "further", "input_schema": {"type": "object"}}}
    gone = {"type": "tool_reference", "name": "look"}
    changes = [{"type": "tool_addition", "tool": added}, {"type": "tool_removal", "tool": gone}]
    request, _ = chat_of("messages", [user(), answer(), {"role": "system", "content": changes}, user()])
    assert names_of(request) == ["further"]
    back = {"role": "system", "content": [{"type": "tool_addition", "tool": gone}]}
    request, _ = chat_of("messages", [user(), {"role": "system", "content": changes}, answer(), back, user()])
    assert names_of(request) == ["look", "further"]


def test_a_conversation_of_nothing_but_unknown_items_is_an_empty_message():
    shown, skipped = read("responses", [{"type": f"kind_{number}"} for number in range(10_000)], instructions="Rules.")
    assert shown == [("system", "Rules."), ("user", "")]
    assert len(skipped) == 10_000


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ("x-anthropic-billing-header: cc_version=2.1; cch=00000;\nYou code.", "You code."),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                {"type": "text", "text": "A"},
            ],
            "A",
        ),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "x-anthropic-billing-header: cch=1;\nB"}], "A\n\nB"),
        ("You code.\nx-anthropic-billing-header: stays", "You code.\nx-anthropic-billing-header: stays"),
    ],
)
def test_the_billing_line_before_a_system_prompt_is_removed(system, shown):
    line = "x-anthropic-billing-header: cch=1;\nhi"
    assert read("messages", [user(line)], system=system)[0] == [("system", shown), ("user", line)]
    if isinstance(system, str):
        assert read("responses", [user(line)], instructions=system)[0] == [("system", shown), ("user", line)]
        first = {"role": "system", "content": system}
        assert read("chat", [first, user(line)])[0] == [("system", shown), ("user", line)]


def test_a_system_prompt_of_nothing_but_the_billing_line_is_none():
    line = "x-anthropic-billing-header: cc_version=2; cch=1;"
    assert read("chat", [{"role": "system", "content": line}, user()])[0] == [("user", "question")]
    assert read("messages", [user()], system=line)[0] == [("user", "question")]
    assert read("responses", [user()], instructions=line)[0] == [("user", "question")]


def test_past_messages_of_any_types_are_read():
    odd = {"role": "assistant", "content": {"type": "text", "text": "x"}, "tool_calls": {"name": "look"}}
    assert read("chat", [odd, user()])[0] == [("assistant", "x", [("look", {})]), ("user", "question")]
