"""The folder of files and batches.

state.sqlite3       what there is, and what batches have answered so far
content/ID          files that are complete
incoming/NAME       files that are being written; removed at the start
runner.lock         held by the process that works on the batches
"""

from pathlib import Path
from sqlite3 import Connection

from troupellm.server.storage.database import Schema, open_database

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
SCHEMA = Schema(setting="files_dir", version=2, tables=_TABLES, synchronous="FULL")


def open_folder(folder: Path) -> Connection:
    """Open the database. Makes what is not there, readable by the owner only. Blocks.

    Raises:
        OSError, sqlite3.Error, ConfigError: see `open_database`.
    """
    for part in (folder, folder / CONTENT, folder / INCOMING):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_database(SCHEMA, folder / STATE)
