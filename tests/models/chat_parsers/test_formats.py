"""Every format that is written with marks of its own: texts as models write them, whole, by character, cut anywhere."""

import json
from typing import Any

import pytest
from cut_texts import Meaning, read, read_in_all_cuts
from recorded_dialects import TOOLS
from written_formats import FORMATS, Format

from troupellm.models.chat_parsers.catalog import REASONING_PARSERS, chat_syntax_named
from troupellm.models.chat_parsers.syntax import ChatSyntax, marks_of

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 2})
NOW: tuple[str, dict[str, Any]] = ("now", {})
AWKWARD = ("send", {"text": 'He said "é" \\ and\nleft <b>5 & 6</b> {x: [1'})
NESTED = ("send", {"to": ["x", "y"], "options": {"a": 1, "b": ["p", "q"]}, "loud": True, "note": None})


def chat_syntax_of(written: Format) -> ChatSyntax:
    reasoning = written.reasoning or written.parser
    return chat_syntax_named(written.parser, reasoning if reasoning in REASONING_PARSERS else "qwen3", written.suffix)


def behind(chat_syntax: ChatSyntax) -> str:
    """The start of an answer without thoughts. Headers of messages come first in any case."""
    return "free" if chat_syntax.thinking is not None and chat_syntax.thinking.header else "answer"


def meant(found: Meaning) -> tuple[object, object, list[tuple[str, Any]]]:
    return found.content, found.reasoning, [(name, json.loads(arguments)) for name, arguments in found.calls]


def sections_of(chat_syntax: ChatSyntax) -> list[str]:
    """Marks around all calls, which are never text."""
    calls = chat_syntax.calls
    assert calls is not None
    return [mark for pair in [*([calls.section] if calls.section else []), *calls.sections] for mark in pair]


def named(formats: list[Format]) -> dict[str, Any]:
    return {"argvalues": formats, "ids": [f"{entry.parser}-{place}" for place, entry in enumerate(formats)]}


MARKED = [entry for entry in FORMATS if entry.lead and not entry.lead.startswith("```")]
THINKERS = [entry for entry in MARKED if chat_syntax_of(entry).thinking is not None]
LEADS = [entry for entry in MARKED if entry.lead not in sections_of(chat_syntax_of(entry))]


@pytest.fixture(params=FORMATS, ids=[f"{entry.parser}-{place}" for place, entry in enumerate(FORMATS)])
def written(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.mark.parametrize(
    "calls", [[PARIS], [ROME, PARIS], [NOW], [AWKWARD], [NESTED]], ids=["one", "two", "empty", "awkward", "nested"]
)
def test_calls_as_the_family_writes_them(written: Format, calls: list[tuple[str, dict[str, Any]]]):
    chat_syntax = chat_syntax_of(written)
    for hidden in (frozenset(), frozenset(marks_of(chat_syntax))):
        found = read_in_all_cuts(chat_syntax, written.calls(calls), TOOLS, hidden=hidden, start=behind(chat_syntax))
        assert meant(found) == (None, None, calls)
        assert found.whole


def test_thoughts_content_and_calls_are_told_apart(written: Format):
    chat_syntax = chat_syntax_of(written)
    reasoning = chat_syntax.thinking is not None
    begin, end = written.thinks if reasoning else ("", "")
    text = f"{begin}{'Let me look.' if reasoning else ''}{end}{written.wraps[0]}Looking now.{written.wraps[1]}"
    found = read_in_all_cuts(chat_syntax, text + written.calls([PARIS, ROME]), TOOLS)
    assert meant(found) == ("Looking now.", "Let me look." if reasoning else None, [PARIS, ROME])


@pytest.mark.parametrize("entry", **named(THINKERS))
def test_a_whole_call_of_an_offered_tool_ends_thoughts(entry: Format):
    text = f"{entry.thinks[0]}Let me see. {entry.calls([PARIS])}"
    found = read_in_all_cuts(chat_syntax_of(entry), text, TOOLS, start="free" if entry.thinks[0] else "thinking")
    assert meant(found) == (None, "Let me see.", [PARIS])


@pytest.mark.parametrize("entry", **named(LEADS))
def test_the_mark_of_a_call_in_prose_is_text(entry: Format):
    chat_syntax = chat_syntax_of(entry)
    prose = f"Write {entry.lead} and go on."
    assert meant(read_in_all_cuts(chat_syntax, prose, TOOLS, start=behind(chat_syntax))) == (prose, None, [])
    if chat_syntax.thinking is not None:
        found = read_in_all_cuts(chat_syntax, f"{prose}{chat_syntax.thinking.closes[0]}Done.", TOOLS, start="thinking")
        assert meant(found) == ("Done.", prose, [])


def test_a_limit_before_the_arguments_shows_no_marks(written: Format):
    """The text ends within the call's head: nothing is shown; behind the name: a call without arguments."""
    chat_syntax = chat_syntax_of(written)
    text = written.calls([("get_weather", {"city": "Paris", "days": 2})])
    for length in range(text.index("get_weather") + len("get_weather") + 3):
        found = read(chat_syntax, [text[:length]], TOOLS, cut=True, start=behind(chat_syntax))
        if not text[:length].endswith(("<", "<｜", "[", "`", "]<]")) and length > 3:
            assert (found.content or "").strip() in ("", "to", *_plain_heads(text[:length])), text[:length]
        assert found.reasoning is None
        assert [name for name, _ in found.calls] in ([], ["get_weather"])
        assert not found.whole


def _plain_heads(text: str) -> list[str]:
    """A head that begins with letters, or a fence, may be a text."""
    return [text.strip()] if text[:1].isalpha() or text.startswith("```") else []


def test_a_limit_within_the_arguments_leaves_them_open(written: Format):
    chat_syntax = chat_syntax_of(written)
    text = written.calls([("get_weather", {"city": "Paris", "days": 2})])
    found = read_in_all_cuts(chat_syntax, text[: text.index("Paris") + 3], TOOLS, cut=True, start=behind(chat_syntax))
    assert not found.content
    assert [name for name, _ in found.calls] == ["get_weather"]
    assert not found.whole
