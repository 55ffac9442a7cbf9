"""Lines of answers in Ollama's form."""

import json
from datetime import UTC, datetime

from troupellm.protocol.params.chat_events import (
    CallArguments,
    CallStart,
    Content,
    Finished,
    Reasoning,
    TurnEvent,
)
from troupellm.protocol.params.outputs import Timing, TokenLogprob, TopLogprob, Usage
from troupellm.server.ollama.lines import Lines, chat_line, generate_line

MOMENT = datetime(2026, 12, 1, 12, 0, 0, 5, UTC)
USAGE = Usage(prompt_tokens=7, completion_tokens=3)
TIMING = Timing(scheduled=0.5, first_token=0.75, finished=1.0)
TOTALS = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 1_000_000_000,
    "load_duration": 1,
    "prompt_eval_count": 7,
    "prompt_eval_duration": 250_000_000,
    "eval_count": 3,
    "eval_duration": 250_000_000,
}
COMMON = {"model": "m", "created_at": "2026-12-01T12:00:00.000005Z"}


def lines(shape=chat_line) -> Lines:
    return Lines(shape, "m", lambda: MOMENT)


def events(*pieces) -> list[TurnEvent]:
    return [TurnEvent(0, piece) for piece in pieces]


def read(data: bytes) -> list[dict]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def test_the_text_of_one_wake_is_one_line():
    (line,) = read(lines().feed(events(Content("Hel"), Content("lo"))))
    assert line == COMMON | {"done": False, "message": {"role": "assistant", "content": "Hello"}}


def test_thinking_comes_before_content_and_never_behind_it_in_a_line():
    made = lines()
    first, second = read(made.feed(events(Reasoning("H"), Reasoning("m."), Content("So."), Reasoning("Wait."))))
    assert first["message"] == {"role": "assistant", "content": "So.", "thinking": "Hm."}
    assert second["message"] == {"role": "assistant", "content": "", "thinking": "Wait."}


def test_a_call_is_sent_once_it_is_whole():
    made = lines()
    assert made.feed(events(CallStart(0, "c1", "add"), CallArguments(0, '{"a": '))) == b""
    (line,) = read(made.feed(events(CallArguments(0, "1}"), CallStart(1, "c2", "sub"), Finished("tool_calls"))))
    assert line["message"]["tool_calls"] == [
        {"id": "c1", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "function": {"index": 1, "name": "sub", "arguments": {}}},
    ]
    (end,) = read(made.end(USAGE, TIMING))
    assert end == COMMON | TOTALS | {"message": {"role": "assistant", "content": ""}}


def test_a_whole_answer_is_one_text_with_everything_in_it():
    made = lines()
    pieces = events(Reasoning("Hm."), Content("So."), CallStart(0, "c1", "f"), Finished("length"))
    whole = json.loads(made.whole(pieces, USAGE, TIMING))
    call = {"id": "c1", "function": {"index": 0, "name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "So.", "thinking": "Hm.", "tool_calls": [call]}
    assert whole == COMMON | TOTALS | {"done_reason": "length", "message": answer}


def test_a_prompts_answer_is_a_response():
    made = lines(generate_line)
    assert read(made.feed(events(Content("x")))) == [COMMON | {"done": False, "response": "x"}]
    assert read(made.loaded("load")) == [COMMON | {"done": True, "done_reason": "load", "response": ""}]


def test_log_probabilities_travel_with_their_tokens_also_without_text():
    entry = TokenLogprob(5, -0.5, 1, "é", b"\xc3\xa9", (TopLogprob(5, -0.5, 1, "é", b"\xc3\xa9"),))
    (line,) = read(lines().feed([TurnEvent(0, Content(""), (5,), (entry,))]))
    top = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert line["logprobs"] == [top | {"top_logprobs": [top]}]
    assert line["message"]["content"] == ""


def test_arguments_that_are_no_object_are_shown_as_they_are():
    made = lines()
    (line,) = read(made.feed(events(CallStart(0, "c", "f"), CallArguments(0, "[1"), Finished("length"))))
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"raw_arguments": "[1"}


def test_durations_are_never_zero():
    (line,) = read(lines().end(USAGE, Timing()))
    assert all(line[name] >= 1 for name in line if name.endswith("_duration"))
