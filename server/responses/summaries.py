"""The text of a compaction item: a summary of a conversation, and the user's newest message word for word."""

import msgspec

from troupellm.server.responses.sealed import sealed

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
