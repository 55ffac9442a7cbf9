"""The JSON object of a call's arguments while it comes: repaired where that is possible, and ended by marks.

Control characters within strings are escaped. A mark that ends the call closes what is still open; at the end of the
text it stays open.
"""

import re
from collections.abc import Callable
from typing import Final

from troupellm.models.chat_parsers.json_text import JsonScanner
from troupellm.models.chat_parsers.text_stream import Reading, Source, beyond, more
from troupellm.models.chat_parsers.until_marker import MOST_SPACES, Marks

_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_SHORT: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_BRACKETS: Final = {"{": "}", "[": "]"}


class ArgumentEnds:
    """Marks that end arguments."""

    def __init__(self, outside: Marks, anywhere: Marks) -> None:
        """
        Args:
            outside: those that count outside of strings.
            anywhere: special tokens, which no string has.
        """
        self.outside = outside
        self.anywhere = anywhere


class _Limits:
    """The places of the next marks in a text, searched once."""

    def __init__(self, source: Source, ends: ArgumentEnds) -> None:
        self._source = source
        self._ends = ends
        self.anywhere = self._place(ends.anywhere, source.pos)
        self._outside = self._place(ends.outside, source.pos)

    def outside(self, position: int) -> int:
        """The first place at or behind `position` where text outside of strings ends."""
        if self._outside < position:
            self._outside = self._place(self._ends.outside, position)
        return min(self._outside, self.anywhere)

    def _place(self, marks: Marks, position: int) -> int:
        text = self._source.text
        found = marks.find(text, position)
        if found is not None:
            return found.start()
        return len(text) if self._source.ended else marks.partial(text, position)


def json_arguments(source: Source, emit: Callable[[str], None], ends: ArgumentEnds) -> Reading[bool]:
    """Hand an object's text on as it comes; False when the text ends before it, or it is none. Marks are not taken."""
    scanner, writer = JsonScanner(), _Writer(emit)
    while (yield from more(source)):
        limits = _Limits(source, ends)
        text, position = source.text, source.pos
        while not (scanner.done or scanner.failed):
            inside = scanner.in_string
            limit = limits.anywhere if inside else limits.outside(position)
            if position >= limit:
                break
            following = scanner.step(text, position, limit)
            piece = source.take(following - position)
            if inside:
                writer.inside(piece)
            else:
                writer.outside(piece)
            position = following
        if scanner.done:
            return True
        if scanner.failed:
            writer.flush()
            return False
        if position < len(text):
            marks = ends.anywhere if scanner.in_string else ends.outside
            if marks.starts(text, position) or ends.anywhere.starts(text, position):
                writer.close(scanner)
                source.repaired = True
                return True
            yield from beyond(source, len(source.text) - position)
    writer.flush()
    return False


class _Writer:
    """Shows the text of an object. White space and commas are held back until the next character comes."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held = ""
        self._tail = ""
        """The last character outside of strings, white space and commas left out."""
        self._before = ""
        """The one before the string that was begun last."""
        self._escaped = False

    def outside(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip(" \t\r\n,")
        self._held = text[len(kept) :]
        if kept:
            if kept[-1] == '"':
                before = kept[:-1].rstrip()
                self._before = before[-1] if before else self._tail
            self._tail = kept[-1]
            self._emit(kept)
        if len(self._held) > MOST_SPACES:
            self.flush()

    def inside(self, text: str) -> None:
        escaped = self._escaped
        # The scanner ends a piece behind a backslash, and behind the character that this one escapes.
        self._escaped = not escaped and text.endswith("\\")
        if escaped:
            self._emit(_escape(text) if _CONTROL.match(text) else text)
        else:
            self._emit(_CONTROL.sub(lambda found: "\\" + _escape(found[0]), text))

    def flush(self) -> None:
        if self._held:
            self._emit(self._held)
            self._held = ""

    def close(self, scanner: JsonScanner) -> None:
        """Write the missing end of the object; a comma before it is left out."""
        self._held = ""
        if scanner.in_string:
            self._emit("\\" if self._escaped else "")
            self._emit('"')
            self._tail = '"'
        brackets = scanner.brackets
        if self._tail == ":":
            self._emit(" null")
        elif self._tail == '"' and self._before != ":" and brackets[-1:] == ["{"]:
            self._emit(": null")
        self._emit("".join([_BRACKETS[bracket] for bracket in reversed(brackets)]))


def _escape(character: str) -> str:
    """A control character's escape, without the backslash."""
    return _SHORT.get(character) or f"u{ord(character):04x}"
