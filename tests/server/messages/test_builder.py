"""The events of a message, in their order, and the blocks that they build."""

import json

import msgspec
import pytest

from troupellm.protocol.api.anthropic import Message, MessageUsage
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, Finished, Reasoning, TurnEvent
from troupellm.protocol.params.outputs import Usage
from troupellm.server.messages.builder import MessageBuilder, encoded

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)


def events_of(pieces, *, max_tokens=100, context=12, show_thinking=True, usage=USAGE):
    empty = Message(id="msg_1", model="m", content=[], usage=MessageUsage(input_tokens=0, output_tokens=0))
    builder = MessageBuilder(empty, max_tokens=max_tokens, context=context, show_thinking=show_thinking)
    told = builder.begin(7)
    for piece in pieces:
        told += builder.feed([TurnEvent(0, piece)])
    told += builder.finish(usage)
    blocks = [block.split("\n") for block in encoded(told).decode().split("\n\n")[:-1]]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [body["type"] for body in bodies]
    return bodies, builder.message


def test_accepted_and_rejected_predictions_are_in_the_usage_details():
    drafted = Usage(prompt_tokens=7, completion_tokens=5, draft_steps=2, draft_tokens=6, accepted_draft_tokens=1)
    bodies, message = events_of([Content("He"), Finished("stop")], usage=drafted)
    told = {
        "thinking_tokens": 0,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 5,
        "prediction_steps": 2,
    }
    assert bodies[-2]["usage"]["output_tokens_details"] == told
    assert msgspec.to_builtins(message.usage.output_tokens_details) == told
    bodies, _ = events_of([Finished("stop")])
    assert bodies[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


def test_thinking_text_and_tools():
    pieces = [
        Reasoning("hm "),
        Reasoning("yes"),
        Content("Look."),
        CallStart(0, "call_1", "get"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ":1}"),
        CallStart(1, "call_2", "put"),
        Finished("tool_calls"),
    ]
    bodies, message = events_of(pieces)
    assert [(body["type"], body.get("index"), body.get("delta", {}).get("type")) for body in bodies] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    thinking, text, one, two = message.content
    assert (thinking.thinking, text.text) == ("hm yes", "Look.")
    assert thinking.signature == bodies[5]["delta"]["signature"] != ""
    assert [(use.id, use.name, use.input) for use in (one, two)] == [
        ("call_1", "get", {"a": 1}),
        ("call_2", "put", {}),
    ]
    assert bodies[0]["message"]["usage"]["input_tokens"] == 7
    usage = bodies[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 3, 5)
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}
    assert bodies[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("finished", "max_tokens", "reason", "sequence"),
    [
        (Finished("stop"), 100, "end_turn", None),
        (Finished("stop", 258), 100, "end_turn", None),
        (Finished("stop", "END"), 100, "stop_sequence", "END"),
        (Finished("length"), 5, "max_tokens", None),
        (Finished("length"), 6, "model_context_window_exceeded", None),
    ],
)
def test_a_message_ends_with_the_stop_reason_of_anthropic(finished, max_tokens, reason, sequence):
    _, message = events_of([Content("x"), finished], max_tokens=max_tokens)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_an_answer_that_was_cut_by_the_server_alone_has_reached_a_limit():
    _, message = events_of([Content("x"), Finished("length")], max_tokens=6, context=13)
    assert message.stop_reason == "max_tokens"


def test_thinking_may_be_left_out():
    bodies, message = events_of([Reasoning("secret"), Content("x"), Finished("stop")], show_thinking=False)
    assert "secret" not in json.dumps(bodies)
    assert (message.content[0].thinking, bool(message.content[0].signature)) == ("", True)


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "{'a': 1}"])
def test_arguments_that_are_no_object_are_shown(arguments):
    _, message = events_of([CallStart(0, "c", "f"), CallArguments(0, arguments), Finished("stop")])
    assert message.content[0].input == {"raw_arguments": arguments}


def test_no_text_is_no_block():
    _, message = events_of([Content(""), Finished("stop")])
    assert message.content == []


def test_the_start_tells_what_was_cached_where_it_is_known():
    empty = Message(id="msg_1", model="m", content=[], usage=MessageUsage(input_tokens=0, output_tokens=0))
    start, _ = MessageBuilder(empty, max_tokens=9, context=12).begin(7, 3)
    assert (start.message.usage.input_tokens, start.message.usage.cache_read_input_tokens) == (4, 3)
