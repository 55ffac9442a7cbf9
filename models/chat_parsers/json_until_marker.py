"""A value in JSON up to its closing mark. Its strings may hold the text of marks, as a template renders them."""

import re
from collections.abc import Callable, Container
from typing import Final

from troupellm.models.chat_parsers.text_stream import Reading, Source, beyond, more
from troupellm.models.chat_parsers.until_marker import Marks

_SIGNS: Final = re.compile(r"[\"'\\{}\[\]]")


class _Scan:
    """Where a text is within a list or an object, in the quotes of JSON or of Python."""

    def __init__(self) -> None:
        self._begun = False
        self._quote = ""
        self._escaped = False
        self._depth = 0

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    @property
    def is_whole(self) -> bool:
        return self._depth == 0 and not self._quote

    def add(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
            self._begun = text[:1] in ("{", "[")
        if not self._begun:
            return
        position = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while (match := _SIGNS.search(text, position)) is not None:
            sign, position = match[0], match.end()
            if self._quote:
                if sign == "\\":
                    self._escaped = position == len(text)
                    position += 1
                elif sign == self._quote:
                    self._quote = ""
            elif sign in "\"'":
                self._quote = sign
            else:
                self._depth += (sign in "{[") - (sign in "}]")


def json_until(
    source: Source, marks: Marks, always: Container[str], show: Callable[[str], None], longest: int
) -> Reading[str]:
    """Read a list or an object up to a mark, which is taken; returns it, empty at the end of the text.

    A mark within a string is part of the value if another mark stands behind the whole value. Otherwise the string was
    never closed, and the first mark ends the value.

    Args:
        always: marks that end the value within strings too.
        longest: characters that are looked at behind a mark within a string.
    """
    scan = _Scan()
    while (yield from more(source)):
        found = marks.find(source.text, source.pos)
        if found is not None:
            end = found.start()
        else:
            end = len(source.text) if source.ended else marks.partial(source.text, source.pos)
        text = source.take(end - source.pos)
        scan.add(text)
        show(text)
        if found is not None:
            mark: str = found[0]
            if scan.in_string and mark not in always:
                mark, length = yield from _behind_string(source, marks, always, scan, mark, longest)
                show(source.take(length))
            source.take(len(mark))
            return mark
        if source.pos < len(source.text):
            yield from beyond(source, len(source.text) - source.pos)
    return ""


def _behind_string(
    source: Source, marks: Marks, always: Container[str], scan: _Scan, first: str, longest: int
) -> Reading[tuple[str, int]]:
    """The mark that ends the value and its distance; `first` stands next, within a string. Takes nothing.

    Where a limit ended the text, there is no such mark and all of it is the value's.
    """
    seen, searched = 0, len(first)
    while True:
        found = marks.find(source.text, source.pos + searched)
        if found is None:
            unread = len(source.text) - source.pos
            if source.ended or unread > longest:
                return ("", unread) if source.ended and source.cut else (first, 0)
            searched = marks.partial(source.text, source.pos + searched) - source.pos
            yield from beyond(source, unread)
            continue
        if found[0] in always:
            return first, 0
        scan.add(source.text[source.pos + seen : found.start()])
        seen, searched = found.start() - source.pos, found.end() - source.pos
        if not scan.in_string:
            return (found[0], seen) if scan.is_whole else (first, 0)
