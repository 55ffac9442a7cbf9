r"""Replaces a pattern that begins with look-aheads, which no backend supports, with several patterns without any.

Some schema generators write them: pydantic for decimals, up to its version 2.13, and zod for mail addresses. Each
look-ahead requires that the text also matches another pattern.
"""

from typing import Any, Final

_HEADS: Final = {
    "(?!^[-+.]*$)": "[^-+.]",
    r"(?!\.)": "^([^.](?s:.*))?$",
    r"(?!.*\.\.)": r"^\.?([^.]+\.)*[^.]*$",
}
"""Look-aheads at the start of a pattern, and the second pattern that each one stands for."""


def without_look_ahead(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with such a pattern written as several; others stay, look-aheads and all."""
    pattern, other = schema.get("pattern"), schema.get("allOf", [])
    if not isinstance(pattern, str) or not pattern.startswith("^(?!") or not isinstance(other, list):
        return schema
    rest, also = pattern[1:], []
    while (head := next((head for head in _HEADS if rest.startswith(head)), None)) is not None:
        rest = rest.removeprefix(head)
        also.append({"pattern": _HEADS[head]})
    if "(?" in rest.replace("(?:", "") or "|" in rest:
        return schema
    return schema | {"pattern": "^" + rest, "allOf": [*other, *also]} if also else schema
