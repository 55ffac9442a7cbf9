import msgspec
import pytest

from troupellm.protocol.api.chat import ChatMessage, ChatRequest
from troupellm.protocol.api.response_objects import CompactionItem, ResponseObject
from troupellm.protocol.api.responses import ContextManagement, ResponsesRequest
from troupellm.protocol.api.tools import ChosenFunction, ToolChoiceBody
from troupellm.protocol.errors import InvalidRequest, RequestFailed
from troupellm.protocol.params.outputs import Usage
from troupellm.server.openai.chat_turn import tool_use_of
from troupellm.server.responses.compact import (
    MAX_NEWEST_BYTES,
    compacted,
    optional_choice,
    summary_of,
    threshold_of,
    together,
    without_trigger,
)
from troupellm.server.responses.generate import stored_form
from troupellm.server.responses.items import conversation_of
from troupellm.server.responses.prepare import Plan
from troupellm.server.storage.kept_items import after_compaction

TRIGGER = {"type": "compaction_trigger"}
SAID = {"role": "user", "content": "Hi"}
KEPT = {"type": "compaction", "encrypted_content": "trp1.x"}
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def test_the_trigger_is_taken_from_the_end():
    request, wanted = without_trigger(ResponsesRequest(input=[SAID, TRIGGER]))
    assert (request.input, wanted) == ([SAID], True)
    for given in ("text", None, [SAID], []):
        request = ResponsesRequest(input=given)
        assert without_trigger(request) == (request, False)


@pytest.mark.parametrize(("given", "param"), [([TRIGGER, SAID], "input[0]"), ([SAID, TRIGGER, TRIGGER], "input[1]")])
def test_a_trigger_elsewhere_is_refused(given, param):
    with pytest.raises(InvalidRequest, match="must be the last item") as caught:
        without_trigger(ResponsesRequest(input=given))
    assert caught.value.param == param


def test_a_background_response_is_not_compacted():
    managed = [ContextManagement(type="compaction", compact_threshold=5)]
    for check, request in (
        (without_trigger, ResponsesRequest(input=[TRIGGER], background=True)),
        (threshold_of, ResponsesRequest(context_management=managed, background=True)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(request)
        assert caught.value.param == "background"


def test_the_first_threshold_counts():
    entries = [ContextManagement(type="compaction", compact_threshold=number) for number in (None, 9, 5)]
    assert threshold_of(ResponsesRequest(context_management=entries)) == 9
    assert threshold_of(ResponsesRequest(context_management=entries[:1])) is None
    assert threshold_of(ResponsesRequest()) is None
    with pytest.raises(InvalidRequest, match="must be compaction"):
        threshold_of(ResponsesRequest(context_management=[ContextManagement(type="other")]))


def test_the_summary_stands_behind_the_system_messages():
    messages = [ChatMessage(role=role, content=role) for role in ("system", "system", "user", "assistant", "user")]
    chat = compacted(ChatRequest(messages=messages), summary_of(messages, "short", USAGE))
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "system"),
        ("system", "system"),
        ("user", "Summary so far: short"),
        ("user", "user"),
    ]


@pytest.mark.parametrize("newest", ["Three", "x" * (MAX_NEWEST_BYTES + 1)])
def test_the_item_gives_the_newest_message_back_as_one_of_its_own(newest):
    messages = [ChatMessage(role=role, content=text) for role, text in (("user", newest), ("assistant", "Four"))]
    summary = summary_of(messages, "short", USAGE)
    made = conversation_of([{"type": "compaction", "encrypted_content": summary.sealed}], None)
    kept = [newest] if len(newest) <= MAX_NEWEST_BYTES else []
    assert [message["content"] for message in made.messages] == ["Summary so far: short", *kept]
    assert [message.content for message in compacted(ChatRequest(messages=messages), summary).messages][1] == newest


def test_a_summary_of_a_summary_does_not_keep_the_first_one_as_a_message():
    messages = [ChatMessage(role="user", content="Summary so far: old")]
    assert summary_of(messages, "new", USAGE).newest is None


def test_an_empty_summary_is_refused():
    with pytest.raises(RequestFailed, match="empty summary"):
        summary_of([ChatMessage(role="user", content="Hi")], "", USAGE)


def test_a_summary_needs_no_call_and_is_shown_the_same_tools():
    chosen = ToolChoiceBody(function=ChosenFunction(name="f"))
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    shown = {}
    for choice in (None, "none", "auto", "required", chosen):
        chat = msgspec.convert({"messages": [], "tools": tools}, ChatRequest)
        chat = msgspec.structs.replace(chat, tool_choice=choice)
        asked = msgspec.structs.replace(chat, tool_choice=optional_choice(choice))
        use, before = tool_use_of(asked), tool_use_of(chat)
        assert (use.tools, use.required) == (before.tools, False), choice
        shown[str(choice)] = len(use.tools)
    assert shown == {"None": 2, "none": 0, "auto": 2, "required": 2, str(chosen): 1}


def test_a_kept_conversation_begins_at_its_last_compaction():
    assert after_compaction([SAID, KEPT, SAID, KEPT, SAID]) == [KEPT, SAID]
    assert after_compaction([SAID, SAID]) == [SAID, SAID]


def test_a_kept_conversation_keeps_the_systems_first_messages():
    rules = [{"type": "message", "role": "developer", "content": "Rules"}, {"role": "system", "content": "More"}]
    later = {"role": "developer", "content": "Later"}
    assert after_compaction([*rules, SAID, later, KEPT, SAID]) == [*rules, KEPT, SAID]
    assert after_compaction([*rules, KEPT]) == [*rules, KEPT]


def test_the_usage_of_both_passes_is_added():
    one = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=3)
    other = Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=1)
    both = together(one, other)
    assert (both.prompt_tokens, both.completion_tokens, both.cached_tokens) == (14, 7, 4)


@pytest.mark.parametrize(("items", "border"), [([SAID], 3), ([KEPT, SAID], 0)])
def test_a_response_with_a_compaction_is_kept_without_the_border_of_truncation(items, border):
    frame = ResponseObject(
        id="resp_1", created_at=0, status="completed", model="m", store=True, temperature=1.0, top_p=1.0
    )
    plan = Plan(
        owner="",
        chat=ChatRequest(messages=[]),
        names=[],
        namespaced={},
        frame=frame,
        items=items,
        background=False,
        streaming=False,
        sealing=False,
        border=3,
    )
    assert stored_form(plan, frame).border == border
    made = msgspec.structs.replace(frame, output=[CompactionItem(id="cmp_1", encrypted_content="trp1.x")])
    assert stored_form(plan, made).border == 0
