"""One stored response: what it is, how its row is read, and what becomes of one whose process has ended."""

import sqlite3
import time
from typing import Any

import msgspec

Items = list[dict[str, Any]]

LEASE_SECONDS = 10.0
"""A running response without a sign of life for that long has failed with its process."""
RUNNING = ("queued", "in_progress")
CONVERSATION = "conversation"
"""The status of a row that is a conversation of its own and no response."""
LOST = "the process that generated this response has ended"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    previous: str | None
    status: str
    background: bool
    logged: bool
    """Its events are kept, to be read again."""
    body: bytes
    """The response object as JSON."""
    items: bytes
    """Its input items as a JSON list."""
    border: int = 0
    """How many of the oldest turns of its conversation `truncation: auto` has left out of its prompt."""

    @property
    def running(self) -> bool:
        return self.status in RUNNING

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)


def read_row(
    database: sqlite3.Connection, owner: str, name: str, *, conversation: bool = False
) -> StoredResponse | None:
    """A response (or a conversation) that is there, and note that it was used."""
    now = time.time()
    bury(database)
    row = database.execute(
        "SELECT id, previous, status, background, logged, body, items, border FROM responses "
        "WHERE id = ? AND owner = ? AND expires > ? AND (status = 'conversation') = ?",
        (name, owner, now, conversation),
    ).fetchone()
    if row is None:
        return None
    database.execute("UPDATE responses SET used = ? WHERE id = ?", (now, name))
    return StoredResponse(
        id=row[0], previous=row[1], status=row[2], background=bool(row[3]), logged=bool(row[4]), body=row[5],
        items=row[6], border=row[7],
    )  # fmt: skip


def size_of(
    database: sqlite3.Connection, owner: str, name: str, *, conversation: bool = False
) -> tuple[str | None, int] | None:
    """The response before it, and its size in bytes, which are not read for this."""
    row: tuple[str | None, int] | None = database.execute(
        "SELECT previous, length(body) + length(items) FROM responses WHERE id = ? AND owner = ? AND expires > ? "
        "AND (status = 'conversation') = ?",
        (name, owner, time.time(), conversation),
    ).fetchone()
    return row


def bury(database: sqlite3.Connection) -> None:
    """Running responses of a dead process have failed, and age from now on like all others.

    A lease of the future is one from before the machine was started anew.
    """
    now = time.monotonic()
    lost = database.execute(
        "SELECT id, body FROM responses WHERE status IN ('queued', 'in_progress') AND (lease > ? OR lease < ?)",
        (now, now - LEASE_SECONDS),
    ).fetchall()
    for name, body in lost:
        failed = failed_body(body, LOST)
        database.execute(
            "UPDATE responses SET status = 'failed', bytes = bytes - length(body) + ?, body = ? WHERE id = ?",
            (len(failed), failed, name),
        )


def failed_body(body: bytes, message: str, code: str = "server_error") -> bytes:
    """The response object of a response that will never be finished."""
    response = msgspec.json.decode(body)
    response |= {"status": "failed", "error": {"code": code, "message": message}}
    return msgspec.json.encode(response)
