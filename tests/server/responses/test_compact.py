import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.openai import ChatMessage, ChatRequest
from troupellm.protocol.outputs import Usage
from troupellm.protocol.responses import ContextManagement, ResponsesRequest
from troupellm.server.responses.compact import (
    Summary,
    after_compaction,
    compacted,
    threshold_of,
    together,
    without_trigger,
)

TRIGGER = {"type": "compaction_trigger"}
SAID = {"role": "user", "content": "Hi"}
KEPT = {"type": "compaction", "encrypted_content": "trp1.x"}


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
    summary = Summary("short", "trp1.x", Usage(prompt_tokens=1, completion_tokens=1))
    chat = compacted(ChatRequest(messages=messages), summary)
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "system"),
        ("system", "system"),
        ("user", "Summary so far: short"),
    ]


def test_a_kept_conversation_begins_at_its_last_compaction():
    assert after_compaction([SAID, KEPT, SAID, KEPT, SAID]) == [KEPT, SAID]
    assert after_compaction([SAID, SAID]) == [SAID, SAID]


def test_the_usage_of_both_passes_is_added():
    one = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=3)
    other = Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=1)
    both = together(one, other)
    assert (both.prompt_tokens, both.completion_tokens, both.cached_tokens) == (14, 7, 4)
