"""Rows of the folder's database: one statement each, inside the caller's transaction."""

import os
import sqlite3
from pathlib import Path

import msgspec

from troupellm.protocol.api.batches import OVER, Batch, FileObject, Purpose, RequestCounts
from troupellm.protocol.errors import InvalidRequest

FILE = "id, bytes, created, expires, filename, purpose"
BATCH = "body, total, completed, failed"
OVER_STATUSES = "(" + ", ".join(f"'{status}'" for status in sorted(OVER)) + ")"


def usage(database: sqlite3.Connection, owner: str) -> int:
    """Bytes of an owner's files, and of what its batches have answered so far."""
    row = database.execute("SELECT bytes FROM usage WHERE owner = ?", (owner,)).fetchone()
    return 0 if row is None else int(row[0])


def add_usage(database: sqlite3.Connection, owner: str, size: int) -> None:
    database.execute(
        "INSERT INTO usage (owner, bytes) VALUES (?, ?) "
        "ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes",
        (owner, size),
    )


def count(database: sqlite3.Connection, name: str, number: int = 1) -> None:
    """Add to a counter that lasts."""
    database.execute(
        "INSERT INTO counts (name, number) VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET number = number + excluded.number",
        (name, number),
    )


def save_batch(database: sqlite3.Connection, batch: Batch) -> None:
    """Its counts are kept beside it."""
    database.execute(
        "UPDATE batches SET status = ?, body = ? WHERE id = ?", (batch.status, msgspec.json.encode(batch), batch.id)
    )


def as_batch(row: tuple[bytes, int, int, int]) -> Batch:
    body, total, completed, failed = row
    counts = RequestCounts(total=total, completed=completed, failed=failed)
    return msgspec.structs.replace(msgspec.json.decode(body, type=Batch), request_counts=counts)


def sync_folder(folder: Path) -> None:
    """A name that was given or taken is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_batch(database: sqlite3.Connection, owner: str, batch_id: str) -> Batch | None:
    row = database.execute(f"SELECT {BATCH} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    return None if row is None else as_batch(row)


def as_file(row: tuple[str, int, int, int | None, str, str]) -> FileObject:
    file_id, size, created, expires, filename, purpose = row
    known: Purpose = "batch" if purpose == "batch" else "batch_output"
    return FileObject(
        id=file_id, bytes=size, created_at=created, expires_at=expires, filename=filename, purpose=known
    )  # fmt: skip


def place_of(database: sqlite3.Connection, table: str, owner: str, after: str | None) -> int | None:
    if after is None:
        return None
    row = database.execute(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
    if row is None:
        raise InvalidRequest("after names nothing that is there", param="after")
    return int(row[0])


def page_clauses(place: int | None, *, newest: bool) -> tuple[str, list[object]]:
    return ("", []) if place is None else (f"AND number {'<' if newest else '>'} ?", [place])
