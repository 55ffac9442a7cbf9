"""The text of an answer while it comes, and what has been made of it. Read by coroutines that yield to get more."""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from troupellm.protocol.dialect import CallArguments, CallStart, Content, ParsedPiece, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads on as far as the text goes, and yields when it needs more of it."""

MOST_HELD: Final = 64 * 1024
"""Characters of what may become a call. More than that is no call."""

MOST_CALLS: Final = 128
"""In one answer; whatever comes then is content."""

_SPACES: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]*")
_LONGEST_NAME: Final = 128
_CONTENT, _REASONING, _ARGUMENTS = range(3)

NewId = Callable[[int, str], str]
"""Makes an id from the number of a call and the name of its function."""


class NotACall(Exception):
    """What began like a call is none; it is shown as it is."""


class Source:
    """Unread text, output, and the text of a trial that may have to be shown after all."""

    __slots__ = (
        "_gap", "_held", "_held_length", "_ids", "_kind", "_most_calls", "_new_id", "_out", "_parts",
        "calls", "cut", "ended", "pos", "region", "text", "whole",
    )  # fmt: skip

    def __init__(self, new_id: NewId, most_calls: int) -> None:
        """
        Args:
            most_calls: calls after so many are read and not shown.
        """
        self.text = ""
        self.pos = 0
        self.ended = False
        """No more text comes."""
        self.cut = False
        """It ended before the model did."""
        self.calls = 0
        self.whole = True
        """The last call that is shown has all its arguments."""
        self.region = "start"
        """What is being read; for tests and for logs."""
        self._held: list[str] | None = None
        self._held_length = 0
        self._gap = ""
        self._out: list[ParsedPiece] = []
        self._kind = _CONTENT
        self._parts: list[str] = []
        self._new_id = new_id
        self._most_calls = most_calls
        self._ids: set[str] = set()

    # Text.

    def add(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    @property
    def pending(self) -> str:
        """What was not shown yet, and may be."""
        return self._gap + "".join(self._held or ()) + self.text[self.pos :]

    def take(self, count: int) -> str:
        """
        Raises:
            NotACall: more is held than may be; nothing was taken beyond that.
        """
        if self._held is not None and self._held_length + count > MOST_HELD:
            self._keep(MOST_HELD - self._held_length)
            raise NotACall
        return self._keep(count)

    def _keep(self, count: int) -> str:
        taken = self.text[self.pos : self.pos + count]
        self.pos += count
        if self._held is not None:
            self._held.append(taken)
            self._held_length += count
        return taken

    def back(self, count: int) -> None:
        """Have the characters that were taken last unread again; only outside of trials, and before more text."""
        self.pos -= count

    # Trials.

    def attempt(self, gap: str = "", opening: str = "") -> None:
        """From here on what is taken is held, until `commit` or `give_up`.

        Args:
            gap: white space before, which is shown only if this is no call.
            opening: what was read already.
        """
        self._gap = gap
        self._held = [opening]
        self._held_length = len(opening)

    @property
    def attempting(self) -> bool:
        return self._held is not None

    def commit(self) -> None:
        self._held, self._gap = None, ""

    def give_up(self) -> str:
        """The text that was held, with the white space before it."""
        held = self._gap + "".join(self._held or ())
        self.commit()
        return held

    # Output. Neighbours of a kind become one piece.

    def content(self, text: str) -> None:
        self._say(_CONTENT, text)

    def reasoning(self, text: str) -> None:
        self._say(_REASONING, text)

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins; what was held was its beginning.

        Args:
            call_id: as the model wrote it; empty where it wrote none.

        Raises:
            NotACall: there were too many already.
        """
        if self.calls >= MOST_CALLS:
            raise NotACall
        self.commit()
        self._flush()
        number, self.calls = self.calls, self.calls + 1
        if number < self._most_calls:
            self.whole = False
            self._out.append(CallStart(number, self._own_id(number, name, call_id), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        if self.calls <= self._most_calls:
            self._say(_ARGUMENTS, text)

    def end_call(self) -> None:
        """The last call has all its arguments."""
        if self.calls <= self._most_calls:
            self.whole = True

    def _own_id(self, number: int, name: str, call_id: str) -> str:
        """An id that no other call of the answer has: models write the same one twice."""
        found = call_id or self._new_id(number, name)
        for other in range(MOST_CALLS):
            if found not in self._ids:
                break
            found = self._new_id(other, name)
        self._ids.add(found)
        return found

    def drain(self) -> list[ParsedPiece]:
        """The pieces since the last time."""
        self._flush()
        out, self._out = self._out, []
        return out

    def _say(self, kind: int, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind == _CONTENT:
            self._out.append(Content(text))
        elif self._kind == _REASONING:
            self._out.append(Reasoning(text))
        else:
            self._out.append(CallArguments(self.calls - 1, text))


# Reading.


def more(source: Source) -> Reading[bool]:
    """Wait for text; False at the end of it."""
    while source.pos >= len(source.text):
        if source.ended:
            return False
        yield
    return True


def spaces(source: Source) -> Reading[None]:
    """Skip white space. The next character is another one, or there is none."""
    while (yield from more(source)):
        match = _SPACES.match(source.text, source.pos)
        if match is not None and match.end() > source.pos:
            source.take(match.end() - source.pos)
        if source.pos < len(source.text):
            return


def peek(source: Source) -> Reading[str]:
    """The next character, which is not taken; empty at the end."""
    there = yield from more(source)
    return source.text[source.pos] if there else ""


def beyond(source: Source, seen: int) -> Reading[None]:
    """Wait until there is more than so many unread characters, or no more will come."""
    while len(source.text) - source.pos <= seen and not source.ended:
        yield


def comes(source: Source, text: str) -> Reading[bool]:
    """Whether `text` comes next. Nothing is taken."""
    while not source.text.startswith(text, source.pos):
        available = len(source.text) - source.pos
        if source.ended or available >= len(text) or not text.startswith(source.text[source.pos :]):
            return False
        yield
    return True


def literal(source: Source, text: str) -> Reading[bool]:
    """Take `text` if it comes next, else nothing."""
    if not (yield from comes(source, text)):
        return False
    source.take(len(text))
    return True


def word(source: Source) -> Reading[str]:
    """A run of the characters that names have.

    Raises:
        NotACall: there is none, or it is too long.
    """
    parts: list[str] = []
    length = 0
    while (yield from more(source)):
        match = _NAME.match(source.text, source.pos)
        end = source.pos if match is None else min(match.end(), source.pos + _LONGEST_NAME + 1 - length)
        length += end - source.pos
        parts.append(source.take(end - source.pos))
        if source.pos < len(source.text):
            break
    if not 0 < length <= _LONGEST_NAME:
        raise NotACall
    return "".join(parts)
