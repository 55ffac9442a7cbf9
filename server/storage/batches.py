"""Files and batches on disk. Each is found by its id *and* its owner: another key's file does not exist.

API processes share the folder with the process that works on the batches.
"""

import os
import secrets
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from sqlite3 import Connection

import msgspec

from troupellm.protocol.api.batches import Batch, BatchList, FileList, FileObject, Purpose
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import Conflict, EngineOverloaded, InvalidRequest
from troupellm.server.base.errors import HttpError
from troupellm.server.base.private_files import sync_folder
from troupellm.server.storage import batches_rows as rows
from troupellm.server.storage.batches_rows import OVER_STATUSES
from troupellm.server.storage.database import Database, reading, transaction

KEPT_BATCHES = 10_000
"""Finished ones of a key that are still told of; the oldest are forgotten."""


def new_file(name: str, size: int, purpose: Purpose, life: int | None) -> FileObject:
    """
    Args:
        life: seconds after which it expires.
    """
    created = int(time.time())
    expires = None if life is None else created + life
    file_id = f"file-{secrets.token_hex(12)}"
    return FileObject(id=file_id, bytes=size, created_at=created, expires_at=expires, filename=name, purpose=purpose)


def no_such(kind: str) -> HttpError:
    """The answer where it is not there, or another key's."""
    return HttpError(404, f"there is no such {kind}", code=f"{kind}_not_found")


def new_batch(
    batch_id: str, endpoint: str, input_file_id: str, window: tuple[str, int], metadata: dict[str, str] | None
) -> Batch:
    """
    Args:
        window: the time for its completion, as it was written and in seconds.
    """
    created = int(time.time())
    return Batch(
        id=batch_id,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=window[0],
        status="validating",
        created_at=created,
        expires_at=created + window[1],
        metadata=metadata,
    )


class Store(Database):
    def __init__(self, config: ServerConfig) -> None:
        message = "the server cannot store or read files now"
        refusal = partial(HttpError, 503, message, code="storage_failed", retry=True)
        self.enabled = config.files_dir is not None
        self.folder = Path(config.files_dir or ".")
        self.config = config
        super().__init__(rows.SCHEMA, self.folder / rows.STATE, refusal)

    def require(self) -> None:
        """
        Raises:
            HttpError: 404, the server keeps no files.
        """
        if not self.enabled:
            message = "the server keeps no files: start it with --files-dir"
            raise HttpError(404, message, code="not_configured")

    def _open(self) -> Connection:
        return rows.open_folder(self.folder)

    def content(self, file_id: str) -> Path:
        return self.folder / rows.CONTENT / file_id

    def incoming(self, name: str) -> Path:
        return self.folder / rows.INCOMING / name

    # Files.

    async def check_room(self, owner: str) -> None:
        """Before a file is taken in; it is counted again when it is complete.

        Raises:
            EngineOverloaded: the owner has as many files or bytes as it may.
        """
        await self._count_refusal(self.read(lambda database: self._check_room(database, owner, 1)))

    async def add_file(self, owner: str, file: FileObject, written: Path) -> None:
        """A complete file takes its place.

        Raises:
            EngineOverloaded: the owner has as many files or bytes as it may.
        """

        def write(database: Connection) -> None:
            self._check_room(database, owner, file.bytes)
            self.insert_file(database, owner, file, written)

        await self._count_refusal(self.transact(write))

    async def file(self, owner: str, file_id: str) -> FileObject | None:
        return await self.read(lambda database: self.find_file(database, owner, file_id))

    @transaction
    def delete_file(self, database: Connection, owner: str, file_id: str) -> bool:
        """
        Raises:
            Conflict: a batch that is not over reads it.
        """
        if self.find_file(database, owner, file_id) is None:
            return False
        used = database.execute(
            f"SELECT 1 FROM batches WHERE owner = ? AND input = ? AND status NOT IN {OVER_STATUSES}", (owner, file_id)
        ).fetchone()
        if used is not None:
            raise Conflict("a batch that is not over yet reads this file", code="file_in_use")
        self._remove_file(database, file_id)
        return True

    @reading
    def files(
        self, database: Connection, owner: str, *, after: str | None, limit: int, newest: bool, purpose: str | None
    ) -> FileList:
        """
        Raises:
            InvalidRequest: there is no file `after`.
        """
        where, given = "(expires IS NULL OR expires > ?) AND purpose = coalesce(?, purpose)", (time.time(), purpose)
        source = f"{rows.FILE} FROM files"
        return FileList(
            **rows.page(database, source, rows.as_file, owner, where, given, after=after, newest=newest, limit=limit)
        )

    @transaction
    def purge(self, database: Connection) -> None:
        """Remove files that have expired."""
        expired = database.execute(
            "SELECT id FROM files WHERE expires <= ? AND NOT EXISTS "
            f"(SELECT 1 FROM batches WHERE input = files.id AND status NOT IN {OVER_STATUSES})",
            (time.time(),),
        ).fetchall()
        for (file_id,) in expired:
            self._remove_file(database, file_id)

    # Batches.

    @transaction
    def add_batch(self, database: Connection, owner: str, batch: Batch, life: int | None) -> None:
        """
        Args:
            life: seconds after which its output files expire.

        Raises:
            InvalidRequest: its input file is not there, or is none for batches.
            EngineOverloaded: the owner has as many unfinished ones as it may.
        """
        file = self.find_file(database, owner, batch.input_file_id)
        if file is None or file.purpose != "batch":
            message = "input_file_id must name an uploaded file with purpose batch"
            raise InvalidRequest(message, param="input_file_id", code="invalid_file")
        (unfinished,) = database.execute(
            f"SELECT count(*) FROM batches WHERE owner = ? AND status NOT IN {OVER_STATUSES}", (owner,)
        ).fetchone()
        if unfinished >= self.config.max_batches:
            raise EngineOverloaded(f"there are {unfinished} unfinished batches, which is the most", retry_after=60.0)
        database.execute(
            "INSERT INTO batches (id, owner, status, input, expires, life, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (batch.id, owner, batch.status, batch.input_file_id, batch.expires_at, life, msgspec.json.encode(batch)),
        )
        database.execute(
            f"DELETE FROM batches WHERE owner = ? AND status IN {OVER_STATUSES} AND number <= "
            "(SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (owner, owner, KEPT_BATCHES),
        )

    async def batch(self, owner: str, batch_id: str) -> Batch | None:
        return await self.read(lambda database: rows.find_batch(database, owner, batch_id))

    @reading
    def batches(
        self,
        database: Connection,
        owner: str,
        *,
        after: str | None,
        before: str | None = None,
        limit: int,
        prefix: str = "",
    ) -> BatchList:
        """Newest first.

        Args:
            after, before: the page begins behind a batch, or ends before one; not both.
            prefix: how the ids of all of them begin.

        Raises:
            InvalidRequest: there is no batch `after` or `before`.
        """
        source, where, given = f"{rows.BATCH} FROM batches", "substr(id, 1, ?) = ?", (len(prefix), prefix)
        page = rows.page(database, source, rows.as_batch, owner, where, given, after=after, before=before, limit=limit)
        return BatchList(**page)

    @transaction
    def cancel_batch(self, database: Connection, owner: str, batch_id: str) -> Batch | None:
        """
        Raises:
            Conflict: it is over, or about to be.
        """
        batch = rows.find_batch(database, owner, batch_id)
        if batch is None or batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise Conflict(f"the batch is {batch.status} and cannot be cancelled", code="batch_over")
        changed = msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(time.time()))
        rows.save_batch(database, changed)
        return changed

    @transaction
    def delete_batch(self, database: Connection, owner: str, batch_id: str) -> None:
        """Forget a batch that is over; its files stay."""
        where = f"id = ? AND owner = ? AND status IN {OVER_STATUSES}"
        database.execute(f"DELETE FROM batches WHERE {where}", (batch_id, owner))

    # Inside a transaction.

    def find_file(self, database: Connection, owner: str, file_id: str) -> FileObject | None:
        row = database.execute(
            f"SELECT {rows.FILE} FROM files WHERE id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
            (file_id, owner, time.time()),
        ).fetchone()
        return None if row is None else rows.as_file(row)

    def insert_file(self, database: Connection, owner: str, file: FileObject, written: Path) -> None:
        """Its bytes are in `written`, and on the disk."""
        database.execute(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created, expires) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at),
        )
        rows.add_usage(database, owner, file.bytes)
        os.replace(written, self.content(file.id))
        sync_folder(self.folder / rows.CONTENT)

    async def _count_refusal(self, work: Awaitable[None]) -> None:
        try:
            await work
        except EngineOverloaded:
            await self.transact(lambda database: rows.count(database, "refused"))  # what was refused was rolled back
            raise

    def _remove_file(self, database: Connection, file_id: str) -> None:
        owner, size = database.execute("SELECT owner, bytes FROM files WHERE id = ?", (file_id,)).fetchone()
        database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        rows.add_usage(database, owner, -size)
        self.content(file_id).unlink(missing_ok=True)

    def _check_room(self, database: Connection, owner: str, size: int) -> None:
        (number,) = database.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()
        if number >= self.config.max_files:
            raise EngineOverloaded(f"there are {number} files, which is the most: delete some", retry_after=60.0)
        if rows.usage(database, owner) + size > self.config.max_stored_bytes:
            most = self.config.max_stored_bytes
            raise EngineOverloaded(f"files may have {most} bytes together: delete some", retry_after=60.0)
