"""The events of a response, their order and numbers, and the items that they build."""

import json

import msgspec
import pytest

from troupellm.protocol.api.response_events import OutputTextDelta
from troupellm.protocol.api.response_objects import ResponseObject
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, Finished, Reasoning, TurnEvent
from troupellm.protocol.params.outputs import TokenLogprob, Usage
from troupellm.server.responses.builder import ResponseBuilder, encoded, response_of_item

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
FRAME = ResponseObject(
    id="resp_" + "a" * 32, created_at=1, status="in_progress", model="m", store=True, temperature=1.0, top_p=1.0
)


def events_of(pieces, *, usage=USAGE, frame=FRAME, chunk=1, namespaced=None):
    builder = ResponseBuilder(frame, namespaced)
    told = builder.begin()
    events = [TurnEvent(0, piece) for piece in pieces]
    for start in range(0, len(events), chunk):
        told += builder.feed(events[start : start + chunk])
    told += builder.finish(usage, 9)
    text = encoded(told).decode()
    blocks = [block.split("\n") for block in text.split("\n\n")[:-1]]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [body["type"] for body in bodies]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    return bodies, builder.response


def test_accepted_and_rejected_predictions_are_in_the_usage_details():
    drafted = msgspec.structs.replace(USAGE, draft_steps=2, draft_tokens=6, accepted_draft_tokens=1)
    bodies, _ = events_of([Content("He"), Finished("stop")], usage=drafted)
    assert bodies[-1]["response"]["usage"]["output_tokens_details"] == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 5,
        "prediction_steps": 2,
    }


def test_a_text_becomes_the_events_of_a_response():
    bodies, response = events_of([Content("He"), Content("llo"), Finished("stop")])
    assert [body["type"] for body in bodies] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert bodies[-1]["response"] == msgspec.to_builtins(response)
    assert bodies[0]["response"]["output"] == []
    assert (response.status, response.completed_at) == ("completed", 9)
    assert response.output[0].content[0].text == "Hello"
    assert msgspec.to_builtins(response.usage) == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_reasoning_text_and_two_calls():
    pieces = [
        Reasoning("hm "),
        Reasoning("yes"),
        Content("Look."),
        CallStart(0, "call_1", "get"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ":1}"),
        CallStart(1, "call_2", "put"),
        CallArguments(1, "{}"),
        Finished("tool_calls"),
    ]
    bodies, response = events_of(pieces)
    assert [item.__struct_config__.tag for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output[0].content[0].text == "hm yes"
    assert [(call.call_id, call.name, call.arguments) for call in response.output[2:]] == [
        ("call_1", "get", '{"a":1}'),
        ("call_2", "put", "{}"),
    ]
    assert len({item.id for item in response.output}) == 4
    assert all(response_of_item(item.id) == FRAME.id for item in response.output)
    assert [body["output_index"] for body in bodies if body["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    done = [body for body in bodies if body["type"] == "response.function_call_arguments.done"]
    assert [(body["item_id"], body["arguments"]) for body in done] == [
        (item.id, item.arguments) for item in response.output[2:]
    ]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        deltas = "".join(body["delta"] for body in bodies if body["type"] == f"response.{kind}.delta")
        whole = "".join(
            body.get("text", body.get("arguments")) for body in bodies if body["type"] == f"response.{kind}.done"
        )
        assert deltas == whole


def test_a_call_of_a_function_in_a_namespace_has_both_its_names_in_every_event():
    pieces = [CallStart(0, "c1", "mcp__docs__search"), CallArguments(0, "{}"), CallStart(1, "c2", "get")]
    namespaced = {"mcp__docs__search": ("mcp__docs", "search")}
    bodies, response = events_of([*pieces, Finished("tool_calls")], namespaced=namespaced)
    items = [body["item"] for body in bodies if body["type"].startswith("response.output_item.")]
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("search", "mcp__docs"),
        ("search", "mcp__docs"),
        ("get", None),
        ("get", None),
    ]
    assert "namespace" not in items[-1]
    done = [body["name"] for body in bodies if body["type"] == "response.function_call_arguments.done"]
    assert done == ["search", "get"]
    assert msgspec.convert(msgspec.to_builtins(response), ResponseObject) == response


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_how_the_pieces_come_makes_no_difference(chunk):
    pieces = [
        Reasoning("a"),
        Content("b"),
        Content("c"),
        CallStart(0, "x", "f"),
        CallArguments(0, "{}"),
        Finished("stop"),
    ]
    assert events_of(pieces, chunk=chunk) == events_of(pieces)


def test_an_answer_that_was_cut_is_incomplete():
    bodies, response = events_of([Content("He"), Finished("length")])
    assert bodies[-1]["type"] == "response.incomplete"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_no_text_at_all_is_an_empty_message():
    _, response = events_of([Content(""), Finished("stop")])
    assert [item.content[0].text for item in response.output] == [""]


def test_a_failure_keeps_what_came_and_says_why():
    builder = ResponseBuilder(FRAME)
    told = builder.begin() + builder.feed([TurnEvent(0, Content("He"))])
    last = builder.fail(503, "draining", "the engine is shutting down", None)
    assert [event.sequence_number for event in told + last] == list(range(len(told) + 2))
    bodies = [json.loads(block.split("data: ")[1]) for block in encoded(last).decode().split("\n\n")[:-1]]
    assert [body["type"] for body in bodies] == ["error", "response.failed"]
    assert (bodies[0]["code"], bodies[0]["message"]) == ("draining", "the engine is shutting down")
    assert bodies[1]["response"]["error"]["code"] == "server_error"
    assert bodies[1]["response"]["output"][0]["content"][0]["text"] == "He"


def described(text, *tokens):
    """A piece of the answer with the log-probabilities of the tokens that came with it."""
    entries = tuple([TokenLogprob(number, -float(number), 1, "?", b"?") for number in tokens])
    return TurnEvent(0, Content(text), tokens, entries)


def test_every_token_of_a_text_has_its_log_probability():
    """Also those at its beginning that are only parts of a character, so that nothing can be shown with them yet."""
    builder = ResponseBuilder(FRAME)
    told = builder.begin()
    for piece in (described("", 1), described("", 2), described("é", 3), described("", 4), described("日x", 5, 6)):
        told += builder.feed([piece])
    told += builder.finish(USAGE, 9)
    deltas = [event for event in told if isinstance(event, OutputTextDelta)]
    streamed = [entry.logprob for event in deltas for entry in event.logprobs]
    assert streamed == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    (part,) = builder.response.output[0].content
    assert (part.text, [entry.logprob for entry in part.logprobs]) == ("é日x", streamed)


def test_tokens_before_thoughts_or_a_call_are_none_of_the_text():
    builder = ResponseBuilder(FRAME)
    pieces = [described("", 1), TurnEvent(0, Reasoning("hm")), described("", 2), described("So.", 3)]
    builder.feed([*pieces, TurnEvent(0, Finished("stop"))])
    builder.finish(USAGE, 9)
    assert [entry.logprob for entry in builder.response.output[1].content[0].logprobs] == [-3.0]
