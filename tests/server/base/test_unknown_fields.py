import logging

import pytest

from troupellm.protocol.api.chat import ChatRequest, CompletionRequest
from troupellm.server.base.json_body import MAX_REMEMBERED, UnknownFields, decode_json


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="troupellm.server")
    return lambda: [record.getMessage() for record in caplog.records]


def test_fields_that_look_like_sampling_are_logged_once(logged):
    unknown = UnknownFields()
    for _ in range(3):
        decode_json(
            b'{"prompt": "x", "typical_p": 0.9, "repeat_penalty": 1.1, "user": "me"}', CompletionRequest, unknown
        )
    assert sorted(line.split()[4] for line in logged()) == ["repeat_penalty,", "typical_p,"]


def test_known_null_and_other_fields_are_not(logged):
    raw = b'{"messages": [], "top_p": 0.5, "top_a": null, "metadata": {"a": "b"}, "store": false, "frobnicate": 1}'
    decode_json(raw, ChatRequest, UnknownFields())
    assert logged() == []


def test_names_that_could_forge_a_line_are_not_logged(logged):
    body = dict.fromkeys(["top_\nERROR all is lost", "TOP_K", "top_" + "x" * 100, "top_\u00e9"], 1)
    UnknownFields().report(body, ChatRequest)
    assert logged() == []


def test_remembered_unknown_fields_are_bounded(logged):
    unknown = UnknownFields()
    for number in range(10 * MAX_REMEMBERED):
        unknown.report({f"top_{number}": 1}, ChatRequest)
    assert len(logged()) == MAX_REMEMBERED
