"""The text of a compaction item: a summary of a conversation, and the user's newest message word for word."""

from typing import Any

import msgspec

from troupellm.server.sealed import sealed

COMPACTION = "compaction"
_SYSTEM = ("system", "developer")
START = "Summary so far: "
"""Begins the message of the user that shows a summary to the model."""


class _Parts(msgspec.Struct, frozen=True, tag="compaction", forbid_unknown_fields=True):
    summary: str
    user: str | None


def sealed_summary(summary: str, user: str | None) -> str | None:
    """Both as the `encrypted_content` of an item; None where they are too long.

    Args:
        user: the user's newest message, where the item is to keep it.
    """
    return sealed(msgspec.json.encode(_Parts(summary, user)).decode())


def said_of(text: str) -> list[str]:
    """The messages of the user that the text of a compaction item stands for. A text without parts is a summary."""
    try:
        parts = msgspec.json.decode(text, type=_Parts)
    except msgspec.MsgspecError:
        parts = _Parts(text, None)
    return said(parts.summary, parts.user)


def said(summary: str, user: str | None) -> list[str]:
    """A summary, and the user's newest message behind it, as messages of the user."""
    return [START + summary, *([] if user is None else [user])]


def after_compaction(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that still count: the system's messages at the start, the last compaction, and the items behind it."""
    places = [place for place, item in enumerate(items) if item.get("type") == COMPACTION]
    if not places:
        return items
    system = (item.get("type", "message") == "message" and item.get("role") in _SYSTEM for item in items)
    first = next((place for place, leads in enumerate(system) if not leads), 0)
    return [*items[:first], *items[places[-1] :]]
