"""The folder of files and batches: its database, and how it is opened.

state.sqlite3       what there is, and what batches have answered so far
content/ID          files that are complete
incoming/NAME       files that are being written; removed at the start
runner.lock         held by the process that works on the batches
"""

import os
import sqlite3
from pathlib import Path

from troupellm.protocol.errors import ConfigError

VERSION = 2
BUSY_SECONDS = 5.0
"""Seconds that a process waits for another one's transaction."""
PARAM = "files_dir"
CONTENT, INCOMING, LOCK, STATE = "content", "incoming", "runner.lock", "state.sqlite3"

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL, expires INTEGER
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, number);
CREATE INDEX IF NOT EXISTS files_by_age ON files (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    input TEXT NOT NULL, expires INTEGER NOT NULL, life INTEGER, total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, number);
CREATE TABLE IF NOT EXISTS results (
    batch INTEGER NOT NULL REFERENCES batches (number) ON DELETE CASCADE, line INTEGER NOT NULL,
    good INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""


def prepare(folder: Path) -> None:
    """Make the folder and its parts, readable by the owner only. Blocks.

    Raises:
        OSError: it cannot be.
    """
    for part in (folder, folder / CONTENT, folder / INCOMING):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_database(folder: Path) -> sqlite3.Connection:
    """Open the database and make its tables. Blocks.

    A commit is on the disk: an accepted batch survives a loss of power.

    Raises:
        OSError, sqlite3.Error: it cannot be opened, or is no database.
        ConfigError: it was written by another version.
    """
    prepare(folder)
    os.close(os.open(folder / STATE, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
    database = sqlite3.connect(folder / STATE, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ConfigError(f"{PARAM}: the folder is of version {version}, this server writes {VERSION}", param=PARAM)
        database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def check_folder(folder: str | None) -> None:
    """Open it once, before anything is served.

    Raises:
        ConfigError: it cannot be used.
    """
    if folder is None:
        return
    try:
        open_database(Path(folder)).close()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{PARAM}: {Path(folder).name} cannot be used: {reason}", param=PARAM) from None
