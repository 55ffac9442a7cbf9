"""Every format that is written with marks of its own: texts as models write them, whole, by character, cut anywhere."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from recorded_dialects import TOOLS
from written_formats import FORMATS, Format

from troupellm.models.dialects.catalog import REASONING_PARSERS, dialect_named
from troupellm.models.dialects.engine import Parser
from troupellm.models.dialects.offer import Offer
from troupellm.models.dialects.plan import plan_of
from troupellm.models.dialects.syntax import Dialect, marks_of
from troupellm.protocol.dialect import assemble

OFFER = Offer(TOOLS)
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 2})
NOW: tuple[str, dict[str, Any]] = ("now", {})
AWKWARD = ("send", {"text": 'He said "é" \\ and\nleft <b>5 & 6</b> {x: [1'})
NESTED = ("send", {"to": ["x", "y"], "options": {"a": 1, "b": ["p", "q"]}, "loud": True, "note": None})


def dialect_of(written: Format) -> Dialect:
    reasoning = written.reasoning or written.parser
    return dialect_named(written.parser, reasoning if reasoning in REASONING_PARSERS else "qwen3", written.suffix)


def behind(dialect: Dialect) -> str:
    """The start of an answer without thoughts. Headers of messages come first in any case."""
    return "free" if dialect.thinking is not None and dialect.thinking.header else "answer"


def read(
    dialect: Dialect, pieces: list[str], *, cut: bool = False, hidden: frozenset[str] = frozenset(), start: str = "free"
) -> tuple[object, ...]:
    parser = Parser(
        plan_of(dialect, hidden),
        offer=OFFER,
        new_id=lambda number, name: f"{name}-{number}",
        start=start,  # type: ignore[arg-type]
    )
    found = [piece for text in pieces for piece in parser.feed(text)]
    message = assemble(found + parser.finish(cut=cut))
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return message.content, message.reasoning, calls, parser.has_whole_calls


def read_in_all_cuts(dialect: Dialect, text: str, **options: Any) -> tuple[object, ...]:
    """What a text means, which is the same by character and in 25 random cuts."""
    whole = read(dialect, [text], **options)
    assert read(dialect, list(text), **options) == whole
    chance = random.Random(len(text))
    for _ in range(25):
        edges = [0, *sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12))), len(text)]
        assert read(dialect, [text[a:b] for a, b in pairwise(edges)], **options) == whole
    return whole


def meant(found: tuple[object, ...]) -> tuple[object, object, list[tuple[str, Any]]]:
    content, reasoning, calls, _ = found
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]  # type: ignore[attr-defined]


@pytest.fixture(params=FORMATS, ids=[f"{entry.parser}-{place}" for place, entry in enumerate(FORMATS)])
def written(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.mark.parametrize(
    "calls", [[PARIS], [ROME, PARIS], [NOW], [AWKWARD], [NESTED]], ids=["one", "two", "empty", "awkward", "nested"]
)
def test_calls_as_the_family_writes_them(written: Format, calls: list[tuple[str, dict[str, Any]]]):
    dialect = dialect_of(written)
    for hidden in (frozenset(), frozenset(marks_of(dialect))):
        found = read_in_all_cuts(dialect, written.calls(calls), hidden=hidden, start=behind(dialect))
        assert meant(found) == (None, None, calls)
        assert found[3]


def test_thoughts_content_and_calls_are_told_apart(written: Format):
    dialect = dialect_of(written)
    thoughts = dialect.thinking is not None
    begin, end = written.thinks if thoughts else ("", "")
    text = f"{begin}{'Let me look.' if thoughts else ''}{end}{written.wraps[0]}Looking now.{written.wraps[1]}"
    found = read_in_all_cuts(dialect, text + written.calls([PARIS, ROME]))
    assert meant(found) == ("Looking now.", "Let me look." if thoughts else None, [PARIS, ROME])


def test_a_whole_call_of_an_offered_tool_ends_thoughts(written: Format):
    dialect = dialect_of(written)
    if dialect.thinking is None or not written.lead or written.lead == "```":
        pytest.skip("no thoughts, or no mark")
    text = f"{written.thinks[0]}Let me see. {written.calls([PARIS])}"
    found = read_in_all_cuts(dialect, text, start="free" if written.thinks[0] else "thinking")
    assert meant(found) == (None, "Let me see.", [PARIS])


def test_the_mark_of_a_call_in_prose_is_text(written: Format):
    dialect = dialect_of(written)
    if not written.lead or written.lead in [mark for _, mark in _sections(dialect)] + [
        m for m, _ in _sections(dialect)
    ]:
        pytest.skip("marks around all calls are never text")
    prose = f"Write {written.lead} and go on."
    assert read_in_all_cuts(dialect, prose, start=behind(dialect))[:3] == (prose, None, ())
    if dialect.thinking is not None:
        found = read_in_all_cuts(dialect, f"{prose}{dialect.thinking.closes[0]}Done.", start="thinking")
        assert found[:3] == ("Done.", prose, ())


def _sections(dialect: Dialect) -> list[tuple[str, str]]:
    calls = dialect.calls
    assert calls is not None
    return [*([calls.section] if calls.section else []), *calls.sections]


def test_a_limit_before_the_arguments_shows_no_marks(written: Format):
    """The text ends within the call's head: nothing is shown; behind the name: a call without arguments."""
    dialect = dialect_of(written)
    text = written.calls([("get_weather", {"city": "Paris", "days": 2})])
    for length in range(text.index("get_weather") + len("get_weather") + 3):
        content, reasoning, calls, whole = read(dialect, [text[:length]], cut=True, start=behind(dialect))
        if not text[:length].endswith(("<", "<｜", "[", "`", "]<]")) and length > 3:
            assert (content or "").strip() in ("", "to", *_plain_heads(text[:length])), text[:length]
        assert reasoning is None
        assert [name for name, _ in calls] in ([], ["get_weather"])  # type: ignore[attr-defined]
        assert not whole or not calls


def _plain_heads(text: str) -> list[str]:
    """A head that begins with letters, or a fence, may be a text."""
    return [text.strip()] if text[:1].isalpha() or text.startswith("```") else []


def test_a_limit_within_the_arguments_leaves_them_open(written: Format):
    dialect = dialect_of(written)
    text = written.calls([("get_weather", {"city": "Paris", "days": 2})])
    read_cut = read_in_all_cuts(dialect, text[: text.index("Paris") + 3], cut=True, start=behind(dialect))
    content, _, calls, whole = read_cut
    assert not content
    assert [name for name, _ in calls] == ["get_weather"]  # type: ignore[attr-defined]
    assert not whole
