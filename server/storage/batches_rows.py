"""Rows of the folder's database: one statement each, inside the caller's transaction."""

import os
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple, get_args

import msgspec

from troupellm.protocol.api.batches import OVER, Batch, BatchStatus, FileObject, RequestCounts
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.storage.database import add_to

FILE = "id, bytes, created, expires, filename, purpose"
_FILE_FIELDS = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
BATCH = "body, total, completed, failed"
OVER_STATUSES = "(" + ", ".join(f"'{status}'" for status in sorted(OVER)) + ")"
OPEN_STATUSES = "(" + ", ".join(f"'{status}'" for status in get_args(BatchStatus) if status not in OVER) + ")"


class Wanted(NamedTuple):
    """Part of an owner's list."""

    owner: str
    after: str | None
    """An id, behind which the part begins."""
    newest: bool
    """The newest come first."""
    limit: int


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


def sync_folder(folder: Path) -> None:
    """A name that was given or taken is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_batch(database: Connection, owner: str, batch_id: str) -> Batch | None:
    row = database.execute(f"SELECT {BATCH} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    return None if row is None else as_batch(row)


def as_file(row: tuple[Any, ...]) -> FileObject:
    return FileObject(**dict(zip(_FILE_FIELDS, row, strict=True)))


def page_rows(
    database: Connection, source: str, where: str, values: tuple[object, ...], wanted: Wanted
) -> tuple[list[Any], bool]:
    """Part of an owner's rows, and whether there are more.

    Args:
        source: columns and the table's name, as a SELECT has them.

    Raises:
        InvalidRequest: there is no row that the part would begin behind.
    """
    if wanted.after is not None:
        place = f"SELECT number FROM {source.rpartition(' ')[2]} WHERE id = ? AND owner = ?"
        row = database.execute(place, (wanted.after, wanted.owner)).fetchone()
        if row is None:
            raise InvalidRequest("after names nothing that is there", param="after")
        where, values = f"{where} AND number {'<' if wanted.newest else '>'} ?", (*values, *row)
    rows = database.execute(
        f"SELECT {source} WHERE owner = ? AND {where} ORDER BY number {'DESC' if wanted.newest else 'ASC'} LIMIT ?",
        (wanted.owner, *values, wanted.limit + 1),
    ).fetchall()
    return rows[: wanted.limit], len(rows) > wanted.limit


def ends(entries: list[FileObject] | list[Batch], *, more: bool) -> dict[str, Any]:
    """The fields of a list beside its entries."""
    names = [entry.id for entry in entries]
    return {"first_id": names[0] if names else None, "last_id": names[-1] if names else None, "has_more": more}
