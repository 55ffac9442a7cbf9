"""Stored responses: how a row is read, what becomes of one whose process has ended, and which of too many go."""

import time
from sqlite3 import Connection
from typing import Any

import msgspec

from troupellm.server.storage.database import add_to

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


def read_row(database: Connection, owner: str, name: str, *, conversation: bool = False) -> StoredResponse | None:
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
        id=row[0],
        previous=row[1],
        status=row[2],
        background=bool(row[3]),
        logged=bool(row[4]),
        body=row[5],
        items=row[6],
        border=row[7],
    )


def size_of(
    database: Connection, owner: str, name: str, *, conversation: bool = False
) -> tuple[str | None, int] | None:
    """The response before it, and its size in bytes, which are not read for this."""
    row: tuple[str | None, int] | None = database.execute(
        "SELECT previous, length(body) + length(items) FROM responses WHERE id = ? AND owner = ? AND expires > ? "
        "AND (status = 'conversation') = ?",
        (name, owner, time.time(), conversation),
    ).fetchone()
    return row


def bury(database: Connection) -> None:
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


def evict(database: Connection, now: float, entries: int, most_bytes: int) -> None:
    """Down to the bounds: expired responses go, then the oldest of the owner that stored most. A running response is
    never removed: running ones have a bound of their own.

    Args:
        now: epoch seconds.
    """
    bury(database)
    expired = database.execute(
        "DELETE FROM responses WHERE expires <= ? AND status NOT IN ('queued', 'in_progress')", (now,)
    ).rowcount
    if expired:
        add_to(database, "evictions", ("reason", "number"), "expired", expired)
    while True:
        number, size = database.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM responses").fetchone()
        if number <= entries and size <= most_bytes:
            return
        gone = database.execute(
            "DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE status NOT IN "
            "('queued', 'in_progress') AND owner = (SELECT owner FROM responses WHERE status NOT IN "
            "('queued', 'in_progress') GROUP BY owner ORDER BY sum(bytes) DESC LIMIT 1) ORDER BY used, id LIMIT 1)"
        ).rowcount
        if not gone:
            return
        add_to(database, "evictions", ("reason", "number"), "entries" if number > entries else "bytes", gone)


def failed_body(body: bytes, message: str, code: str = "server_error") -> bytes:
    """The response object of a response that will never be finished."""
    response = msgspec.json.decode(body)
    response |= {"status": "failed", "error": {"code": code, "message": message}}
    return msgspec.json.encode(response)
