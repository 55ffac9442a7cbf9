"""Which stored responses go when there are too many: expired ones, then the oldest of the owner that stored most."""

import sqlite3

from troupellm.server.storage.responses_rows import bury


def evict(database: sqlite3.Connection, now: float, entries: int, most_bytes: int) -> None:
    """Down to the bounds. A running response is never removed: running ones have a bound of their own.

    Args:
        now: epoch seconds.
    """
    bury(database)
    expired = database.execute(
        "DELETE FROM responses WHERE expires <= ? AND status NOT IN ('queued', 'in_progress')", (now,)
    ).rowcount
    _count(database, "expired", expired)
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
        _count(database, "entries" if number > entries else "bytes", gone)


def _count(database: sqlite3.Connection, reason: str, number: int) -> None:
    if number > 0:
        database.execute(
            "INSERT INTO evictions (reason, number) VALUES (?, ?) ON CONFLICT (reason) DO UPDATE SET "
            "number = number + excluded.number",
            (reason, number),
        )
