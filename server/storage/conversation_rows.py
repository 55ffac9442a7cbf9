"""Conversations in the database of responses. They count there as responses do, so one bound holds for both.

Items are one JSON list, to which new ones are appended as bytes: only a compaction decodes those before it. Each
function is a part of one transaction.
"""

import time
from sqlite3 import Connection
from typing import Any, Final

import msgspec

from troupellm.server.storage.kept_items import COMPACTION, after_compaction
from troupellm.server.storage.responses_rows import CONVERSATION, Items, StoredResponse, evict, read_row

_EMPTY: Final = b"[]"


class Bounds(msgspec.Struct, frozen=True):
    """Of all that is stored, and of one conversation."""

    entries: int
    all_bytes: int
    most_bytes: int
    seconds: float


class ConversationFullError(Exception):
    """A conversation with the new items would have more bytes than one may have."""


def add_conversation(database: Connection, owner: str, name: str, body: bytes, items: Items, bounds: Bounds) -> bool:
    """Keep a new conversation; False where there is no room.

    Raises:
        ConversationFullError: it is too large.
    """
    data = _checked(msgspec.json.encode(items), bounds)
    now = time.time()
    database.execute(
        "INSERT INTO responses (id, owner, previous, status, background, logged, body, items, bytes, used, expires, "
        "runner, lease) VALUES (?, ?, NULL, ?, 0, 0, ?, ?, ?, ?, ?, '', 0)",
        (name, owner, CONVERSATION, body, data, len(body) + len(data), now, now + bounds.seconds),
    )
    evict(database, now, bounds.entries, bounds.all_bytes)
    return database.execute("SELECT 1 FROM responses WHERE id = ?", (name,)).fetchone() is not None


def append_items(database: Connection, owner: str, name: str, items: Items, bounds: Bounds) -> bool:
    """Put items behind those of a conversation; False where it is not there. Of what stands before a compaction only
    the system's messages at the start stay.

    Raises:
        ConversationFullError: it would be too large.
    """
    stored = read_row(database, owner, name, conversation=True)
    if stored is None:
        return False
    new = msgspec.json.encode(items)
    if any(item.get("type") == COMPACTION for item in items):
        data = msgspec.json.encode(after_compaction([*msgspec.json.decode(stored.items, type=Items), *items]))
    elif _EMPTY in (stored.items, new):
        data = new if stored.items == _EMPTY else stored.items
    else:
        data = stored.items[:-1] + b"," + new[1:]
    _write(database, stored, stored.body, _checked(data, bounds), bounds)
    return True


def change_metadata(
    database: Connection, owner: str, name: str, metadata: dict[str, Any], bounds: Bounds
) -> bytes | None:
    """Give a conversation other metadata; its object, or None where it is not there."""
    stored = read_row(database, owner, name, conversation=True)
    if stored is None:
        return None
    body = msgspec.json.encode(msgspec.json.decode(stored.body) | {"metadata": metadata})
    _write(database, stored, body, stored.items, bounds)
    return body


def remove_item(database: Connection, owner: str, name: str, item: str, bounds: Bounds) -> tuple[bytes | None, bool]:
    """Take an item out of a conversation: the conversation's object, and whether the item was there."""
    stored = read_row(database, owner, name, conversation=True)
    if stored is None:
        return None, False
    items = msgspec.json.decode(stored.items, type=Items)
    left = [one for one in items if one.get("id") != item]
    if len(left) < len(items):
        _write(database, stored, stored.body, msgspec.json.encode(left), bounds)
    return stored.body, len(left) < len(items)


def _write(database: Connection, stored: StoredResponse, body: bytes, items: bytes, bounds: Bounds) -> None:
    """The time that a conversation is kept begins again."""
    now = time.time()
    database.execute(
        "UPDATE responses SET body = ?, items = ?, bytes = ?, used = ?, expires = ? WHERE id = ?",
        (body, items, len(body) + len(items), now, now + bounds.seconds, stored.id),
    )
    evict(database, now, bounds.entries, bounds.all_bytes)


def _checked(items: bytes, bounds: Bounds) -> bytes:
    if len(items) > bounds.most_bytes:
        raise ConversationFullError(
            f"a conversation must have at most {bounds.most_bytes} bytes of items, got {len(items)}"
        )
    return items
