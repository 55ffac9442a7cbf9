"""The database of stored responses: its tables, and how it is opened."""

import os
import sqlite3
from pathlib import Path

from troupellm.protocol.errors import ConfigError

VERSION = 1
BUSY_SECONDS = 5.0
"""Seconds that a process waits for another one's transaction."""
_PARAM = "responses_store"

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, background INTEGER NOT NULL,
    logged INTEGER NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL,
    expires REAL NOT NULL, runner TEXT NOT NULL, lease REAL NOT NULL, border INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, status, bytes, used);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (expires, status);
CREATE INDEX IF NOT EXISTS responses_that_run ON responses (lease) WHERE status IN ('queued', 'in_progress');
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, first INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (id, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evictions (reason TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""


def open_database(path: str | None) -> sqlite3.Connection:
    """Open the file, or a database in memory, and make its tables. Blocks.

    Raises:
        sqlite3.Error: it cannot be opened, or is no database.
        ConfigError: it was written by another version.
    """
    if path is not None:
        # It holds people's texts: only the owner may read it, under every umask.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA foreign_keys = ON")
        if path is not None:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ConfigError(f"{_PARAM}: the file is of version {version}, this server writes {VERSION}", param=_PARAM)
        database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        _add_border(database)
    except BaseException:
        database.close()
        raise
    return database


def _add_border(database: sqlite3.Connection) -> None:
    """A column that came later: files without it are of the same version, whose rows name their columns."""
    database.execute("BEGIN IMMEDIATE")
    if "border" not in [row[1] for row in database.execute("PRAGMA table_info(responses)")]:
        database.execute("ALTER TABLE responses ADD COLUMN border INTEGER NOT NULL DEFAULT 0")
    database.execute("COMMIT")


def check_database(path: str | None) -> None:
    """Open and close it once, before anything is served.

    Raises:
        ConfigError: it cannot be used.
    """
    if path is None:
        return
    try:
        open_database(path).close()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{_PARAM}: {Path(path).name} cannot be used: {reason}", param=_PARAM) from None
