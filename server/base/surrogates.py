"""Halves of surrogate pairs in the escapes of JSON text: some programs write them, and no text can hold them."""

import re

_REPLACEMENT = b"fffd"
_HIGH, _LOW = re.compile(rb"[dD][89abAB][0-9a-fA-F]{2}"), re.compile(rb"[dD][c-fC-F][0-9a-fA-F]{2}")
_DIGITS = 4


def without_halves(raw: bytes) -> bytes | None:
    """JSON text with U+FFFD in the place of each half without its other half; None where there is none. Linear."""
    # Pairs of backslashes in another spelling: every backslash that is left begins an escape.
    pieces = raw.replace(b"\\\\", b"\\u005c").split(b"\\u")
    found = False
    place = 1
    while place < len(pieces):
        digits, rest = pieces[place][:_DIGITS], pieces[place][_DIGITS:]
        if _HIGH.fullmatch(digits):
            if not rest and place + 1 < len(pieces) and _LOW.fullmatch(pieces[place + 1][:_DIGITS]):
                place += 2
                continue
            pieces[place], found = _REPLACEMENT + rest, True
        elif _LOW.fullmatch(digits):
            pieces[place], found = _REPLACEMENT + rest, True
        place += 1
    return b"\\u".join(pieces) if found else None
