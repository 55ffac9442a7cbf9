"""Where a request names its session, and which names count."""

import msgspec
import pytest

from troupellm.protocol.api.chat import ChatRequest
from troupellm.server.openai.streaming import MAX_SESSION_ID, session_of

pytestmark = pytest.mark.anyio

ORDER = [
    ({"session_id": "body"}, {}),
    ({}, {"X-Session-ID": "any"}),
    ({}, {"x-claude-code-session-id": "claude"}),
    ({}, {"session_id": "codex"}),
    ({}, {"thread-id": "thread"}),
    ({}, {"x-session-affinity": "opencode"}),
    ({"prompt_cache_key": "key"}, {}),
    ({"metadata": {"user_id": "user"}}, {}),
]
NAMES = ["body", "any", "claude", "codex", "thread", "opencode", "key", "user"]


def found(make_exchange, make_wire, fields, headers):
    request = msgspec.convert({"messages": []} | fields, ChatRequest)
    return session_of(make_exchange(make_wire(), headers=headers), request)


@pytest.mark.parametrize("first", range(len(ORDER)))
async def test_the_first_name_counts(make_exchange, make_wire, first):
    fields, headers = {}, {}
    for body, head in ORDER[first:]:
        fields |= body
        headers |= head
    session = found(make_exchange, make_wire, fields, headers)
    assert (session.id, session.skipped) == (NAMES[first], [])


@pytest.mark.parametrize("name", ["x" * (MAX_SESSION_ID + 1), "a\nb", "a\x00b", "\u202e"])
async def test_names_that_are_too_long_or_unprintable_are_passed_over_and_named(make_exchange, make_wire, name):
    session = found(make_exchange, make_wire, {"session_id": name, "prompt_cache_key": "key"}, {})
    assert (session.id, session.skipped) == ("key", ["session session_id"])
    assert found(make_exchange, make_wire, {"session_id": name}, {}).id is None


async def test_a_request_without_a_name_has_no_session(make_exchange, make_wire):
    session = found(make_exchange, make_wire, {"session_id": "", "metadata": {"a": "b"}}, {"x-session-id": ""})
    assert (session.id, session.skipped) == (None, [])
