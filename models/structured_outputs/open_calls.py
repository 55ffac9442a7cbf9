"""Decides if a text of messages is within a call: only there may its end come before the mark of a waiting guide."""

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from troupellm.protocol.params.guide import EarlyEnd

_LONGEST_HEADER: Final = 1024
"""Bytes of a header that are searched."""


class Place(NamedTuple):
    """The part of a message in which a text is after some token."""

    part: Literal["between", "header", "message", "call"]
    header: bytes
    rest: bytes
    """The text's last bytes, with which a mark may have begun."""


BEGINNING: Final = Place("header", b"", b"")
"""The prompt ends with the first words of a message."""


class OpenCalls:
    """Reads texts of one kind of messages, piece by piece."""

    def __init__(self, early: EarlyEnd) -> None:
        self._starts = frozenset(mark.encode() for mark in early.starts)
        self._opens = early.opens.encode()
        self._recipient = early.recipient.encode()
        bounds = [mark.encode() for mark in (*early.starts, *early.ends)]
        self._within = _any_of(bounds)
        """Marks that count in a message."""
        self._outside = _any_of([*bounds, self._opens])
        self._kept = max(map(len, [*bounds, self._opens])) - 1

    def after(self, place: Place, piece: bytes) -> Place:
        """The place after some more text."""
        part, header, text = place.part, place.header, place.rest + piece
        while found := (self._within if part in ("message", "call") else self._outside).search(text):
            before, mark, text = text[: found.start()], found[0], text[found.end() :]
            if mark == self._opens:
                called = part == "header" and self._recipient in (header + before)[:_LONGEST_HEADER]
                part, header = "call" if called else "message", b""
            elif mark in self._starts:
                header = (header + before + b" ")[:_LONGEST_HEADER] if part == "header" else b""
                part = "header"
            else:
                part, header = "between", b""
        cut = max(0, len(text) - self._kept)
        if part == "header":
            header = (header + text[:cut])[:_LONGEST_HEADER]
        return Place(part, header, text[cut:])


def _any_of(marks: Iterable[bytes]) -> re.Pattern[bytes]:
    """The longest of those that begin at the same place."""
    return re.compile(b"|".join(map(re.escape, sorted(filter(None, marks), key=len, reverse=True))) or b"(?!)")
