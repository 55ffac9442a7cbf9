"""JSON in a text that is still coming: finds the end of a value, and decodes strings as they come.

The scanner follows brackets and strings only; it does not check that a value is valid JSON.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Final

from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, more

MOST_NESTED: Final = 128
"""Most levels of brackets; text with more is not taken for JSON."""

_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_IN_STRING: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r'[\s,:;"{}\[\]()<]')
_PARTNER: Final = {"}": "{", "]": "["}


class JsonScanner:
    """Finds the end of one value, which comes in pieces of any size."""

    __slots__ = ("_escaped", "_in_string", "_open", "_started", "done", "failed")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._started = False
        self.done = False
        self.failed = False

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def brackets(self) -> list[str]:
        """The open brackets."""
        return self._open

    def scan(self, text: str, position: int) -> int:
        """Read from `position` on; tells where the value ends, or where the text does, or what no value can have."""
        end = len(text)
        while position < end and not (self.done or self.failed):
            position = self.step(text, position, end)
        return position

    def step(self, text: str, position: int, end: int) -> int:
        """Read one part, which is either within a string or outside of all strings, and no further than `end`."""
        if not self._started:
            self._started = True
            if text[position] not in '"{[':
                self._open.append("")  # a scalar
        if self._in_string:
            return self._string(text, position, end)
        if self._open and not self._open[-1]:
            match = _SCALAR_END.search(text, position, end)
            self.done = match is not None
            return match.start() if match else end
        return self._structure(text, position, end)

    def _string(self, text: str, position: int, end: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _IN_STRING.search(text, position, end)
        if match is None:
            return end
        if match[0] == '"':
            self._in_string = False
            self.done = not self._open
        else:
            self._escaped = True
        return match.end()

    def _structure(self, text: str, position: int, end: int) -> int:
        match = _OUTSIDE.search(text, position, end)
        if match is None:
            return end
        character = match[0]
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._open.append(character)
            if len(self._open) > MOST_NESTED:
                self.failed = True
                return match.start()
        elif self._open and self._open[-1] == _PARTNER[character]:
            self._open.pop()
            self.done = not self._open
        else:
            self.failed = True
            return match.start()
        return match.end()


def json_value(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Hand a value's text on as it comes; False when the text ends before it, or it is none."""
    scanner = JsonScanner()
    while (yield from more(source)):
        end = scanner.scan(source.text, source.pos)
        emit(source.take(end - source.pos))
        if scanner.done:
            return True
        if scanner.failed:
            return False
    return False


def json_whole(source: Source) -> Reading[object]:
    """A value, parsed.

    Raises:
        NotACall: there is none.
    """
    parts: list[str] = []
    whole = yield from json_value(source, parts.append)
    text = "".join(parts)
    if not whole and not source.ended:
        raise NotACall
    try:
        return json.loads(text, strict=False, parse_float=_finite, parse_constant=str)
    except (ValueError, RecursionError):
        raise NotACall from None


def _finite(text: str) -> float | str:
    """A number, or its text if the number is too large."""
    number = float(text)
    return number if math.isfinite(number) else text
