"""Reads one text whole, by character and in random cuts, and compares what it means."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.syntax import ChatSyntax
from troupellm.protocol.params.chat_events import assemble


class Meaning(msgspec.Struct, frozen=True):
    content: str | None
    reasoning: str | None
    calls: tuple[tuple[str, Any], ...]
    """Names, and arguments as they were written."""
    whole: bool = False
    """There are calls, and the last one has all its arguments."""


def read(
    chat_syntax: ChatSyntax,
    pieces: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    *,
    cut: bool = False,
    hidden: frozenset[str] = frozenset(),
    start: str = "free",
) -> Meaning:
    parser = Parser(
        plan_of(chat_syntax, hidden),
        offered_tools=OfferedTools(tools),
        new_id=lambda number, name: f"{name}-{number}",
        start=start,  # type: ignore[arg-type]
    )
    found = [piece for text in pieces for piece in parser.feed(text)]
    message = assemble(found + parser.finish(cut=cut))
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return Meaning(message.content, message.reasoning, calls, parser.has_whole_calls)


def read_in_all_cuts(chat_syntax: ChatSyntax, text: str, tools: Sequence[Mapping[str, Any]], **options: Any) -> Meaning:
    """The meaning of a text, which is the same by character and in 25 random cuts."""
    whole = read(chat_syntax, [text], tools, **options)
    assert read(chat_syntax, list(text), tools, **options) == whole
    chance = random.Random(len(text))
    for _ in range(25):
        edges = [0, *sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12))), len(text)]
        assert read(chat_syntax, [text[a:b] for a, b in pairwise(edges)], tools, **options) == whole
    return whole
