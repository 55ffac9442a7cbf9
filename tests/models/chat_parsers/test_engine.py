"""One engine, every family: recorded texts, cut anywhere, and random texts."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from troupellm.models.chat_parsers.catalog import REASONING_PARSERS, TOOL_PARSERS, chat_syntax_named
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.syntax import ChatSyntax, marks_of
from troupellm.models.chat_parsers.text_stream import MOST_HELD
from troupellm.protocol.params.chat_events import CallStart, ParsedPiece, assemble as join
from troupellm.protocol.params.outputs import ToolCall
from troupellm.tests.support.chat.recorded_dialects import CASES, TOOLS, Case, plain_calls
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS, FORMATS

OFFER = OfferedTools(TOOLS)
ALIASES = {"holo2", "minimax_m2_append_think"}
"""Of other parsers of thoughts, or without any."""


def assemble(pieces: Sequence[ParsedPiece]) -> tuple[str | None, str | None, tuple[ToolCall, ...]]:
    message = join(pieces)
    return message.content, message.reasoning, message.tool_calls


PAIRS = sorted({(case.tool_parser, case.reasoning_parser) for case in CASES} | {(n, "qwen3") for n in TOOL_PARSERS})
MARKS = sorted({mark for case in CASES for mark in case.text.replace("\n", " ").split() if len(mark) < 40})
NO_TEXT = [r"\ud800", r"\"", "1e999", "NaN"]
"""Values that JSON may hold and an encoding, or JSON itself, cannot."""


WORDS = [*MARKS, *NO_TEXT, " ", "\n", "{", "}", "[", "]", '"', ",", ":", "x", "é"]


def parser_of(chat_syntax: ChatSyntax, start: str = "free", hidden: frozenset[str] = frozenset()) -> Parser:
    with_calls = chat_syntax.calls is not None or chat_syntax.channels is not None
    return Parser(
        plan_of(chat_syntax, hidden),
        offered_tools=OFFER,
        new_id=lambda number, name: f"{name}-{number}",
        start=start,  # type: ignore[arg-type]
        with_calls=with_calls,
    )


def run(
    chat_syntax: ChatSyntax, pieces: Sequence[str], start: str = "free", hidden: frozenset[str] = frozenset()
) -> tuple[list[ParsedPiece], object]:
    parser = parser_of(chat_syntax, start, hidden)
    found = [piece for text in pieces for piece in parser.feed(text)]
    before = parser.state
    return found + parser.finish(), (before, parser.state)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def test_every_parser_has_a_recorded_text_by_its_name():
    written = {entry.parser for entry in FORMATS}
    assert not set(TOOL_PARSERS) - {case.tool_parser for case in CASES} - written
    assert not set(REASONING_PARSERS) - {case.reasoning_parser for case in CASES} - written - ALIASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_text_means_what_it_says(case: Case):
    chat_syntax = chat_syntax_named(case.tool_parser, case.reasoning_parser)
    content, reasoning, calls = assemble(run(chat_syntax, [case.text], case.start)[0])
    assert plain_calls(calls, case.calls) == list(case.calls)
    assert (content, reasoning) == (case.content, case.reasoning)
    assert not case.ids or tuple(call.id for call in calls) == case.ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_text_in_single_characters_is_the_same(case: Case):
    chat_syntax = chat_syntax_named(case.tool_parser, case.reasoning_parser)
    whole, states = run(chat_syntax, [case.text], case.start)
    pieces, other = run(chat_syntax, list(case.text), case.start)
    assert (assemble(pieces), other) == (assemble(whole), states)


@given(case=st.sampled_from(CASES), places=st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_cut_of_a_recorded_text_is_the_same(case: Case, places: list[int]):
    chat_syntax = chat_syntax_named(case.tool_parser, case.reasoning_parser)
    whole, states = run(chat_syntax, [case.text], case.start)
    pieces, other = run(chat_syntax, cut(case.text, places), case.start)
    assert (assemble(pieces), other) == (assemble(whole), states)


@given(
    pair=st.sampled_from(PAIRS),
    words=st.lists(
        st.sampled_from([*MARKS, *NO_TEXT, " ", "\n", "{", "}", "[", "]", '"', ",", ":", "x", "é"]), max_size=25
    ),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    start=st.sampled_from(["free", "thinking", "answer"]),
    special=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_text_in_any_cut_is_the_same(
    pair: tuple[str, str], words: list[str], places: list[int], start: str, special: bool
):
    chat_syntax = chat_syntax_named(*pair)
    hidden = frozenset(mark for mark in marks_of(chat_syntax) if special and mark[0] in "<[")
    text = "".join(words)
    whole, states = run(chat_syntax, [text], start, hidden)
    pieces, other = run(chat_syntax, cut(text, places), start, hidden)
    assert (assemble(pieces), other) == (assemble(whole), states)
    assert all(msgspec.json.encode(piece) for piece in whole)
    numbers = [piece.call for piece in whole if isinstance(piece, CallStart)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("case", [case for case in CASES if case.calls], ids=lambda case: case.name)
def test_no_part_of_a_mark_is_shown_before_a_call(case: Case):
    """The text shown up to the first call is a beginning of the content, at every character."""
    parser = parser_of(chat_syntax_named(case.tool_parser, case.reasoning_parser), case.start)
    shown = ""
    for character in case.text:
        content, _, calls = assemble(parser.feed(character))
        shown += content or ""
        if calls:
            break
    assert (case.content or "").startswith(shown)


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
@pytest.mark.parametrize(
    "text",
    ["<tool_call>" * 3000, '<tool_call>{"' * 3000, "[" * 40_000, "{" * 40_000, " " * 40_000, "[now(" * 8000,
     '{"name":"now","parameters":{"a":' * 1200, "[TOOL_CALLS]" * 3000, "<|channel|>" * 4000, "```" * 12_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_no_text_is_lost_where_nothing_is_called(name: str, text: str):
    """Held text is bounded, and comes out again; nothing raises."""
    chat_syntax = chat_syntax_named(name, "none")
    parser = parser_of(chat_syntax)
    pieces: list[ParsedPiece] = []
    for start in range(0, len(text), 1000):
        pieces += parser.feed(text[start : start + 1000])
        assert len(parser.state[1]) <= MOST_HELD + 2000
    content, _, calls = assemble(pieces + parser.finish())
    if not calls and chat_syntax.channels is None:
        assert content == text


def test_special_marks_never_show():
    chat_syntax = chat_syntax_named("granite", "none")
    hidden = frozenset({"<|tool_call|>"})
    for text in ("a <|tool_call|> b", "<|tool_call|>[{", "<|tool_call|>"):
        parser = parser_of(chat_syntax, hidden=hidden)
        content, _, calls = assemble(parser.feed(text) + parser.finish())
        assert "tool_call" not in (content or "")
        assert not calls


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_thoughts_are_told_from_answers_by_every_parser(name: str):
    chat_syntax = chat_syntax_named("none", name)
    found = chat_syntax.thinking
    if found is not None:
        text = f"{found.opens[0]}a{found.closes[0]}b"
    elif name in ALIASES:
        text = "<think>a</think>b"
        assert assemble(run(chat_syntax, list(text))[0])[:2] == (text, None)
        return
    else:
        text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert assemble(run(chat_syntax, list(text))[0])[:2] == ("b", "a")


def test_only_the_first_call_is_shown_where_one_is_wanted():
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "send", "arguments": {"text": "x"}}</tool_call>!'
    plan = plan_of(chat_syntax_named("hermes", "none"))
    parser = Parser(plan, offered_tools=OFFER, new_id=lambda number, name: "id", most_calls=1)
    content, _, calls = assemble(parser.feed(text) + parser.finish())
    assert [call.name for call in calls] == ["now"]
    assert content == "!"


def test_no_answer_has_more_calls_than_anybody_handles():
    text = '<tool_call>{"name": "now"}</tool_call>' * 200
    _, _, calls = assemble(run(chat_syntax_named("hermes", "none"), [text])[0])
    assert len(calls) == 128
