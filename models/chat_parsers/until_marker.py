"""Text up to the next mark. No part of a mark is shown, and only text that may become a mark is held back."""

import re
from collections.abc import Callable, Iterable
from typing import Final

from troupellm.models.chat_parsers.text_stream import Reading, Source, beyond, more

MOST_SPACES: Final = 256
"""White space before a mark belongs to the mark, up to this many characters."""
LEAST_SHOWN: Final = 4
"""Characters. A longer beginning of a mark is not shown where a limit ends the text within the mark."""


class Marks:
    """A set of marks, none of which is part of another: then the first one that is complete is the right one."""

    def __init__(self, marks: Iterable[str]) -> None:
        """
        Raises:
            ValueError: a mark is empty, or part of another.
        """
        self.all = frozenset(marks)
        for mark in self.all:
            if not mark or any(mark in other for other in self.all if other != mark):
                raise ValueError(f"the mark {mark!r} is part of another one, or empty")
        self._longest = max(map(len, self.all), default=1)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.all))) or r"(?!)")
        firsts = "".join(sorted({mark[0] for mark in self.all}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else re.compile(r"(?!)")

    def find(self, text: str, position: int) -> re.Match[str] | None:
        return self._pattern.search(text, position)

    def starts(self, text: str, position: int) -> bool:
        """True if a whole mark begins at `position`."""
        return self._pattern.match(text, position) is not None

    def partial(self, text: str, position: int) -> int:
        """The position in `text` at which its end may be the beginning of a mark; its length if there is none."""
        start = max(position, len(text) - self._longest + 1)
        for match in self._first.finditer(text, start):
            tail = text[match.start() :]
            if any(mark.startswith(tail) for mark in self.all):
                return match.start()
        return len(text)


class Found:
    """A mark, and the white space before it that was not shown."""

    __slots__ = ("gap", "mark")

    def __init__(self, mark: str, gap: str) -> None:
        self.mark = mark
        self.gap = gap


def text_until(
    source: Source, marks: Marks, show: Callable[[str], None], least: int = LEAST_SHOWN
) -> Reading[Found | None]:
    """Show text until a mark, which is taken; None at the end of the text.

    Args:
        least: characters of a mark's beginning that are not shown where a limit ended the text and nothing stands
            before them.
    """
    shown = False
    while True:
        text, start = source.text, source.pos
        found = marks.find(text, start)
        if found is not None:
            end = found.start()
            edge = _edge(text, start, end)
            show(source.take(edge - start))
            gap = source.take(end - edge)
            source.take(found.end() - end)
            return Found(found[0], gap)
        if source.ended:
            end = marks.partial(text, start) if source.cut else len(text)
            if len(text) - end < (LEAST_SHOWN if shown or end > start else least) or text[end].isalnum():
                end = len(text)
            else:
                end = _edge(text, start, end)
            show(source.take(end - start))
            source.take(len(text) - end)
            return None
        edge = _edge(text, start, marks.partial(text, start))
        shown = shown or edge > start
        show(source.take(edge - start))
        yield from beyond(source, len(text) - edge)


def _edge(text: str, start: int, end: int) -> int:
    """Where the white space before `end` begins that is held back."""
    edge = len(text[start:end].rstrip()) + start
    return max(edge, end - MOST_SPACES)


def raw_until(source: Source, marks: Marks, show: Callable[[str], None]) -> Reading[str]:
    """Read text up to a mark with white space unchanged; returns the mark, empty at the end of the text."""
    while (yield from more(source)):
        found = marks.find(source.text, source.pos)
        if found is not None:
            show(source.take(found.start() - source.pos))
            source.take(len(found[0]))
            return found[0]
        end = len(source.text) if source.ended else marks.partial(source.text, source.pos)
        show(source.take(end - source.pos))
        if source.pos < len(source.text):
            yield from beyond(source, len(source.text) - source.pos)
    return ""
