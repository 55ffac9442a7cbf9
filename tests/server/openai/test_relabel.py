"""Errors in the words of the API that the client speaks."""

import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.openai.translated import relabel

NAMES = [
    ("max_tokens", "max_output_tokens"),
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("messages", "input"),
]


@pytest.mark.parametrize(
    ("param", "message", "wanted_param", "wanted"),
    [
        (
            "stop",
            "stop must hold texts of 1 character",
            "stop_sequences",
            "stop_sequences must hold texts of 1 character",
        ),
        (
            "stop",
            "the sampler: stop has 2, stop is full",
            "stop_sequences",
            "the sampler: stop_sequences has 2, stop is full",
        ),
        (
            "stop[3]",
            "stop[3]: a nonstop stop is too long",
            "stop_sequences[3]",
            "stop_sequences[3]: a nonstop stop is too long",
        ),
        (
            "messages",
            "the chat template refuses these messages: no",
            "input",
            "the chat template refuses these messages: no",
        ),
        ("messages[0].role", "messages[0].role must be user", "input[0].role", "input[0].role must be user"),
        (
            "max_tokens",
            "with max_tokens 9, max_tokens_x",
            "max_output_tokens",
            "with max_output_tokens 9, max_tokens_x",
        ),
        (
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: no",
            "text.format.schema",
            "text.format.schema: no",
        ),
        ("tools", "tools must be few, not stop", "tools", "tools must be few, not stop"),
    ],
)
def test_fields_are_renamed_once_and_words_are_not(param, message, wanted_param, wanted):
    error = relabel(InvalidRequest(message, param=param), NAMES)
    assert (error.param, error.message, str(error)) == (wanted_param, wanted, wanted)
