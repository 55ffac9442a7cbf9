"""Items that a request takes from stored responses: bounded before they are read, and as a whole."""

import msgspec
import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.responses.conversation import Conversation
from troupellm.server.responses.items import conversation_of
from troupellm.server.responses.prepare import _identified
from troupellm.server.storage.responses_rows import StoredResponse

NAME = "resp_" + "a" * 32
ITEM = f"in_{'a' * 32}0000"


def stored(*items, output=()):
    body = msgspec.json.encode({"id": NAME, "output": list(output), "tools": [{"x": "y"}]})
    return StoredResponse(
        id=NAME,
        previous=None,
        status="completed",
        background=False,
        logged=False,
        body=body,
        items=msgspec.json.encode(list(items)),
    )


def item(text):
    return {"role": "assistant", "content": text, "id": ITEM}


def test_references_and_the_past_become_items():
    kept = stored(item("x"), output=[{"type": "message", "id": "msg_1"}])
    conversation = Conversation([{"id": ITEM}, {"role": "user", "content": "y"}], [kept], {NAME: kept}, 10**6)
    before, own, room = conversation.items()
    assert before == [item("x"), {"type": "message", "id": "msg_1"}]
    assert own == [item("x"), {"role": "user", "content": "y"}]
    assert room == 10**6 - len(msgspec.json.encode(item("x")))
    assert conversation.stored_bytes == 2 * (len(kept.items) + len(kept.body))


def test_an_item_counts_as_often_as_it_is_referred_to():
    kept = stored(item("x" * 1_000))
    size = len(msgspec.json.encode(item("x" * 1_000)))
    references = [{"type": "item_reference", "id": ITEM}] * 3
    assert len(Conversation(references, (), {NAME: kept}, 3 * size).items()[1]) == 3
    with pytest.raises(InvalidRequest, match="max-body-bytes") as caught:
        Conversation(references, (), {NAME: kept}, 3 * size - 1).items()
    assert caught.value.param == "input"


def test_a_reference_to_an_item_that_is_not_kept_is_skipped_and_named():
    _, own, _ = Conversation([{"id": "msg_none"}, {"role": "user", "content": "x"}], (), {}, 10).items()
    made = conversation_of(own, None)
    assert made.messages == [{"role": "user", "content": "x"}]
    assert list(made.skipped) == ["item item_reference"]


def test_unreadable_parts_of_items_are_not_kept():
    call = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"x": ["y"] * 99}}
    (kept,) = _identified([call], NAME)
    assert kept == {"type": "web_search_call", "id": "ws_1", "status": "completed"}
