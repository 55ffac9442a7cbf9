"""The folder of files and batches: its tables, and rows as objects. Functions of rows are parts of one transaction.

state.sqlite3       what there is, and what batches have answered so far
content/ID          files that are complete
incoming/NAME       files that are being written; removed at the start
runner.lock         held by the process that works on the batches
"""

from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection
from typing import Any, get_args

import msgspec

from troupellm.protocol.api.batches import OVER, Batch, BatchStatus, FileObject, RequestCounts
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.storage.database import Schema, add_to, open_database

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

FILE = "id, bytes, created, expires, filename, purpose"
_FILE_FIELDS = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
BATCH = "body, total, completed, failed"
OVER_STATUSES = "(" + ", ".join(f"'{status}'" for status in sorted(OVER)) + ")"
OPEN_STATUSES = "(" + ", ".join(f"'{status}'" for status in get_args(BatchStatus) if status not in OVER) + ")"


def open_folder(folder: Path) -> Connection:
    """Open the database. Makes what is not there, readable by the owner only. Blocks.

    Raises:
        OSError, sqlite3.Error, ConfigError: see `open_database`.
    """
    for part in (folder, folder / CONTENT, folder / INCOMING):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_database(SCHEMA, folder / STATE)


def usage(database: Connection, owner: str) -> int:
    """Bytes of an owner's files, and of what its batches have answered so far."""
    row = database.execute("SELECT bytes FROM usage WHERE owner = ?", (owner,)).fetchone()
    return 0 if row is None else int(row[0])


def add_usage(database: Connection, owner: str, size: int) -> None:
    add_to(database, "usage", ("owner", "bytes"), owner, size)


def count(database: Connection, name: str, number: int = 1) -> None:
    """Add to a counter that lasts."""
    add_to(database, "counts", ("name", "number"), name, number)


def save_batch(database: Connection, batch: Batch) -> None:
    """Its counts are kept beside it."""
    database.execute(
        "UPDATE batches SET status = ?, body = ? WHERE id = ?", (batch.status, msgspec.json.encode(batch), batch.id)
    )


def as_batch(row: tuple[bytes, int, int, int]) -> Batch:
    body, total, completed, failed = row
    counts = RequestCounts(total=total, completed=completed, failed=failed)
    return msgspec.structs.replace(msgspec.json.decode(body, type=Batch), request_counts=counts)


def find_batch(database: Connection, owner: str, batch_id: str) -> Batch | None:
    row = database.execute(f"SELECT {BATCH} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    return None if row is None else as_batch(row)


def as_file(row: tuple[Any, ...]) -> FileObject:
    return FileObject(**dict(zip(_FILE_FIELDS, row, strict=True)))


def page(
    database: Connection,
    source: str,
    made: Callable[[Any], FileObject | Batch],
    owner: str,
    where: str,
    values: tuple[object, ...],
    *,
    after: str | None,
    before: str | None = None,
    newest: bool = True,
    limit: int,
) -> dict[str, Any]:
    """The fields of a page of an owner's list.

    Args:
        source: columns and the table's name, as a SELECT has them.
        after, before: an id behind which the page begins, or before which it ends; not both.
        newest: the newest come first.

    Raises:
        InvalidRequest: there is no row `after` or `before`.
    """
    border, newest = (after, newest) if before is None else (before, not newest)
    if border is not None:
        place = f"SELECT number FROM {source.rpartition(' ')[2]} WHERE id = ? AND owner = ?"
        row = database.execute(place, (border, owner)).fetchone()
        if row is None:
            raise InvalidRequest("after names nothing that is there", param="after")
        where, values = f"{where} AND number {'<' if newest else '>'} ?", (*values, *row)
    order = f"ORDER BY number {'DESC' if newest else 'ASC'} LIMIT ?"
    rows = database.execute(
        f"SELECT {source} WHERE owner = ? AND {where} {order}", (owner, *values, limit + 1)
    ).fetchall()
    data = [made(row) for row in rows[:limit]][:: 1 if before is None else -1]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(rows) > limit}
