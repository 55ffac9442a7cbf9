"""Row B11 of the fault table: what fifty kilobytes of a nasty text take to read, counted in what does not depend on the
machine. Time itself is a matter for benchmarks."""

import re
import sys
from types import FrameType

import pytest

from troupellm.models.chat_parsers import python_calls
from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.until_marker import MOST_SPACES
from troupellm.tests.support.chat.recorded_dialects import TOOLS
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS
from troupellm.tests.support.engines.inside import source_of

LENGTH = 50_000
SLICE = 8192
"""As whole answers are read."""
PIECE = 100
"""As streams bring them, with tokens of many letters."""
MOST_CALLS = 40
"""Of functions, for each character; every one of brackets in an argument in Python's syntax takes some twenty."""
LONGEST_MARK = 64
NASTY = {
    "marks": ("", "<tool_call>"),
    "beginnings of marks": ("", "<"),
    "beginnings of calls": ("", '<tool_call>{"'),
    "lists": ("", "[now("),
    "spaces": ("x", " "),
    "backslashes in JSON": ('<tool_call>{"name": "send", "arguments": {"text": "', "\\"),
    "texts in JSON": ('<tool_call>{"name": "send", "arguments": {"to": [', '"a",'),
    "nested JSON": ("", '{"name":"now","parameters":{"a":'),
    "backslashes in Python": ("[send(loud=True, text='", "\\"),
    "texts in Python": ("[send(loud=True, text=", "'a'"),
    "brackets in Python": ("[send(loud=True, text=", "{}"),
    "arguments in Python": ("[send(", "text=1,"),
    "tags": ("<tool_call>\n<function=send>\n<parameter=text>\n", "</parameter"),
    "channels": ("", "<|channel|>analysis<|message|>"),
}

WAITING = {"marks in strings": ('<tool_call>\n<function=send>\n<parameter=to>\n["', "</parameter> ")}
"""Texts that wait for what comes behind them: only the end of the string says if a mark was part of it."""


def nasty(name: str) -> str:
    head, unit = (NASTY | WAITING)[name]
    return head + unit * ((LENGTH - len(head)) // len(unit))


def parser_of(name: str) -> Parser:
    plan = plan_of(chat_syntax_named(name, "none"))
    return Parser(plan, offered_tools=OfferedTools(TOOLS), new_id=lambda number, function: f"{function}-{number}")


def read(parser: Parser, text: str, size: int) -> int:
    """Read a text in pieces; how many characters of it have waited, at most, for what comes behind them."""
    waited = 0
    for start in range(0, len(text), size):
        parser.feed(text[start : start + size])
        waited = max(waited, len(source_of(parser).text) - source_of(parser).pos)
    parser.finish()
    return waited


def calls_of(parser: Parser, text: str) -> int:
    """Functions that were called, ours and the interpreter's."""
    count = 0

    def noted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        read(parser, text, SLICE)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
def test_B11_nasty_text_takes_so_many_calls_for_each_character(name: str) -> None:
    taken = {kind: calls_of(parser_of(name), nasty(kind)) for kind in (*NASTY, *WAITING)}
    assert max(taken.values()) <= MOST_CALLS * LENGTH, taken
    assert min(taken.values()) > 0


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
def test_B11_what_was_read_is_not_read_again_with_the_next_piece(name: str) -> None:
    waited = {kind: read(parser_of(name), nasty(kind), PIECE) for kind in NASTY}
    assert max(waited.values()) <= MOST_SPACES + LONGEST_MARK, waited


class Noted:
    """A pattern, and how many characters it has matched."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.characters = 0

    def match(self, text: str, *places: int) -> re.Match[str] | None:
        found = self._pattern.match(text, *places)
        self.characters += 0 if found is None else len(found[0])
        return found


@pytest.mark.parametrize("size", [SLICE, 2 * LENGTH], ids=["in slices", "at once"])
@pytest.mark.parametrize("head", ["[send(text=", "[send(loud=True, text="], ids=["first", "second"])
def test_B11_an_argument_beyond_its_limit_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, head: str, size: int
) -> None:
    """It is cut there, and what stands behind is not matched anew at each of its quotes."""
    noted = Noted(python_calls._RUN)
    monkeypatch.setattr(python_calls, "_RUN", noted)
    text = head + "'a'" * 24_000 + ")]"
    assert len(text) > python_calls.LONGEST_VALUE
    read(parser_of("pythonic"), text, size)
    assert 0 < noted.characters <= python_calls.LONGEST_VALUE + len(head)
