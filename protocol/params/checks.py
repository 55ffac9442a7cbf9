"""Checks of single values, with error texts that name the field and what it may be."""

from collections.abc import Sequence
from typing import Any, Final

from troupellm.protocol.errors import InvalidRequest

MAX_ID_LIST = 65_536
MAX_ECHO: Final = 64
"""Most characters of foreign text that an error repeats."""


def printable(text: str, most: int = MAX_ECHO) -> str:
    """Foreign text for one line of an error: its beginning, without characters that a terminal or log interprets."""
    shown = "".join(character if character.isprintable() else "?" for character in text[:most])
    return f"{shown}..." if len(text) > most else shown


def got(value: Any) -> str:
    """How an error text ends that repeats what was sent, where that was a text."""
    return f", got {printable(value)}" if isinstance(value, str) else ""


def check_number(field: str, value: Any, low: float, high: float, *, exclusive: bool) -> None:
    """`exclusive`: the lowest value itself is not allowed.

    Raises:
        InvalidRequest: no number, or out of range.
    """
    bracket = "(" if exclusive else "["
    allowed = f"{field} must be a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(allowed, param=field, code="invalid_type")
    if not low <= value <= high or (exclusive and value == low):  # NaN fails every comparison
        code = "decimal_above_max_value" if value > high else "decimal_below_min_value"
        raise InvalidRequest(f"{allowed}, got {shown(value)}", param=field, code=code)


def check_integer(field: str, value: Any, least: int, most: int) -> None:
    """
    Raises:
        InvalidRequest: no integer, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} must be an integer in [{least}, {most}]", param=field, code="invalid_type")
    if not least <= value <= most:
        code = "integer_above_max_value" if value > most else "integer_below_min_value"
        raise InvalidRequest(f"{field} must be in [{least}, {most}], got {shown(value)}", param=field, code=code)


def shown(value: float) -> str:
    """A number for an error text; printing a huge integer takes quadratic time, so it is not printed.

    Whole numbers show as such, also those that a JSON reader has made floats of for a float field.
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:g}"
    return str(value) if abs(value) < 10**20 else "a larger number"


def check_strings(field: str, values: Any, most: int, longest: int) -> None:
    """
    Raises:
        InvalidRequest: not a list of at most `most` texts of 1 to `longest` characters.
    """
    if values is None:
        return
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) > most:
        raise InvalidRequest(f"{field} must be a list of at most {most} strings", param=field)
    for value in values:
        if not isinstance(value, str) or not value or len(value) > longest:
            raise InvalidRequest(f"{field} must hold strings of 1 to {longest} characters", param=field)


def check_id_list(field: str, ids: Any, *, allow_empty: bool, most: int = MAX_ID_LIST) -> None:
    """
    Raises:
        InvalidRequest: not a list of at most `most` token ids; whether the model has them is checked elsewhere.
    """
    if ids is None:
        return
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or len(ids) > most:
        raise InvalidRequest(f"{field} must be a list of at most {most} token ids", param=field)
    if not ids and not allow_empty:
        raise InvalidRequest(f"{field} must not be empty", param=field)
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**31):
        for token_id in ids:  # names the one at fault
            check_integer(field, token_id, 0, 2**31 - 1)
