"""Files and batches on disk. Each is found by its id *and* its owner: another key's file does not exist.

Every transaction runs on a thread, one at a time in a process; SQLite keeps processes apart, so that API processes in
processes of their own share the folder with the process that works on the batches.
"""

import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from troupellm.protocol.api.batches import Batch, FileObject
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import Conflict, EngineOverloaded, InvalidRequest
from troupellm.server.base.errors import HttpError
from troupellm.server.base.threads import offload
from troupellm.server.storage.batches_rows import (
    BATCH,
    FILE,
    OVER_STATUSES,
    add_usage,
    as_batch,
    as_file,
    count,
    find_batch,
    page_clauses,
    place_of,
    save_batch,
    sync_folder,
    usage,
)
from troupellm.server.storage.batches_schema import CONTENT, INCOMING, open_database

logger = logging.getLogger("troupellm.server")

T = TypeVar("T")

KEPT_BATCHES = 10_000
"""Finished ones of a key that are still told of; the oldest are forgotten."""


class Page(msgspec.Struct, frozen=True):
    """Part of a list."""

    entries: list[FileObject] | list[Batch]
    more: bool


class Store:
    """`sqlite3.Error` and `OSError` may come out of everything: the disk is full or gone."""

    def __init__(self, config: ServerConfig) -> None:
        self.enabled = config.files_dir is not None
        self.folder = Path(config.files_dir or ".")
        self.config = config
        self.errors = 0
        """Operations that the disk has refused to this process."""
        self._database: sqlite3.Connection | None = None
        self._turn = anyio.CapacityLimiter(1)
        self._finalizer: weakref.finalize[..., Store] | None = None

    def content(self, file_id: str) -> Path:
        return self.folder / CONTENT / file_id

    def incoming(self, name: str) -> Path:
        return self.folder / INCOMING / name

    # Files.

    async def check_room(self, owner: str) -> None:
        """Before a file is taken in; it is counted again when it is complete.

        Raises:
            EngineOverloaded: the owner has as many files or bytes as it may.
        """
        await self._with_room(self.read, lambda database: self._check_room(database, owner, 1))

    async def add_file(self, owner: str, file: FileObject, written: Path) -> None:
        """A complete file takes its place.

        Raises:
            EngineOverloaded: the owner has as many files or bytes as it may.
        """

        def write(database: sqlite3.Connection) -> None:
            self._check_room(database, owner, file.bytes)
            self.insert_file(database, owner, file, written)

        await self._with_room(self.do, write)

    async def file(self, owner: str, file_id: str) -> FileObject | None:
        return await self.read(lambda database: self.find_file(database, owner, file_id))

    async def delete_file(self, owner: str, file_id: str) -> bool:
        """
        Raises:
            Conflict: a batch that is not over reads it.
        """

        def write(database: sqlite3.Connection) -> bool:
            if self.find_file(database, owner, file_id) is None:
                return False
            used = database.execute(
                f"SELECT 1 FROM batches WHERE owner = ? AND input = ? AND status NOT IN {OVER_STATUSES}",
                (owner, file_id),
            ).fetchone()
            if used is not None:
                raise Conflict("a batch that is not over yet reads this file", code="file_in_use")
            self._remove_file(database, file_id)
            return True

        return await self.do(write)

    async def files(self, owner: str, *, after: str | None, limit: int, newest: bool, purpose: str | None) -> Page:
        """
        Raises:
            InvalidRequest: there is no file `after`.
        """

        def read(database: sqlite3.Connection) -> Page:
            place = place_of(database, "files", owner, after)
            clauses, values = page_clauses(place, newest=newest)
            if purpose is not None:
                clauses, values = clauses + " AND purpose = ?", [*values, purpose]
            rows = database.execute(
                f"SELECT {FILE} FROM files WHERE owner = ? AND (expires IS NULL OR expires > ?) {clauses} "
                f"ORDER BY number {'DESC' if newest else 'ASC'} LIMIT ?",
                (owner, time.time(), *values, limit + 1),
            ).fetchall()
            return Page([as_file(row) for row in rows[:limit]], len(rows) > limit)

        return await self.read(read)

    async def purge(self) -> None:
        """Remove files that have expired."""

        def write(database: sqlite3.Connection) -> None:
            rows = database.execute(
                "SELECT id FROM files WHERE expires <= ? AND NOT EXISTS "
                f"(SELECT 1 FROM batches WHERE input = files.id AND status NOT IN {OVER_STATUSES})",
                (time.time(),),
            ).fetchall()
            for (file_id,) in rows:
                self._remove_file(database, file_id)

        await self.do(write)

    # Batches.

    async def add_batch(self, owner: str, batch: Batch, life: int | None) -> None:
        """
        Args:
            life: seconds after which its output files expire.

        Raises:
            InvalidRequest: its input file is not there, or is none for batches.
            EngineOverloaded: the owner has as many unfinished ones as it may.
        """

        def write(database: sqlite3.Connection) -> None:
            file = self.find_file(database, owner, batch.input_file_id)
            if file is None or file.purpose != "batch":
                message = "input_file_id must name an uploaded file with purpose batch"
                raise InvalidRequest(message, param="input_file_id", code="invalid_file")
            (unfinished,) = database.execute(
                f"SELECT count(*) FROM batches WHERE owner = ? AND status NOT IN {OVER_STATUSES}", (owner,)
            ).fetchone()
            if unfinished >= self.config.max_batches:
                raise EngineOverloaded(
                    f"there are {unfinished} unfinished batches, which is the most", retry_after=60.0
                )
            database.execute(
                "INSERT INTO batches (id, owner, status, input, expires, life, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    batch.id, owner, batch.status, batch.input_file_id, batch.expires_at, life,
                    msgspec.json.encode(batch),
                ),
            )  # fmt: skip
            database.execute(
                f"DELETE FROM batches WHERE owner = ? AND status IN {OVER_STATUSES} AND number <= "
                "(SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (owner, owner, KEPT_BATCHES),
            )

        await self.do(write)

    async def batch(self, owner: str, batch_id: str) -> Batch | None:
        return await self.read(lambda database: find_batch(database, owner, batch_id))

    async def batches(
        self, owner: str, *, after: str | None, before: str | None = None, limit: int, prefix: str = ""
    ) -> Page:
        """Newest first.

        Args:
            after, before: the page begins behind a batch, or ends before one.
            prefix: how the ids of all of them begin.

        Raises:
            InvalidRequest: there is no batch `after` or `before`.
        """
        newest = before is None

        def read(database: sqlite3.Connection) -> Page:
            place = place_of(database, "batches", owner, after if newest else before)
            clauses, values = page_clauses(place, newest=newest)
            rows = database.execute(
                f"SELECT {BATCH} FROM batches WHERE owner = ? AND substr(id, 1, ?) = ? {clauses} "
                f"ORDER BY number {'DESC' if newest else 'ASC'} LIMIT ?",
                (owner, len(prefix), prefix, *values, limit + 1),
            ).fetchall()
            page = [as_batch(row) for row in rows[:limit]]
            return Page(page if newest else page[::-1], len(rows) > limit)

        return await self.read(read)

    async def cancel_batch(self, owner: str, batch_id: str) -> Batch | None:
        """
        Raises:
            Conflict: it is over, or about to be.
        """

        def write(database: sqlite3.Connection) -> Batch | None:
            batch = find_batch(database, owner, batch_id)
            if batch is None or batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise Conflict(f"the batch is {batch.status} and cannot be cancelled", code="batch_over")
            changed = msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(time.time()))
            save_batch(database, changed)
            return changed

        return await self.do(write)

    async def delete_batch(self, owner: str, batch_id: str) -> None:
        """Forget a batch that is over; its files stay."""
        await self.do(
            lambda database: database.execute(
                f"DELETE FROM batches WHERE id = ? AND owner = ? AND status IN {OVER_STATUSES}", (batch_id, owner)
            )
        )

    # For all.

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same as `do` for what only reads: it sees one state of the folder, and waits for no other process."""
        return await self._transact("BEGIN", work)

    async def do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction on a thread. It is not cut short by cancellation.

        Raises:
            HttpError: 404, the server keeps no files; 503, the disk refuses.
        """
        return await self._transact("BEGIN IMMEDIATE", work)

    async def _transact(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        if not self.enabled:
            message = "the server keeps no files: start it with --files-dir"
            raise HttpError(404, message, code="not_configured")

        def transact() -> T:
            if self._database is None:
                self._database = open_database(self.folder)
                self._finalizer = weakref.finalize(self, self._database.close)
            with self._database:  # commits, or rolls back
                self._database.execute(begin)
                return work(self._database)

        try:
            return await offload(transact, limiter=self._turn)
        except (sqlite3.Error, OSError) as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> HttpError:
        """The disk does not do what it should: for the log, and for the client."""
        self.errors += 1
        logger.error("the folder of files: %s", error)
        return HttpError(503, "the server cannot store or read files now", code="storage_failed", retry=True)

    async def close(self) -> None:
        """Idempotent."""
        database, self._database = self._database, None
        if database is not None:
            with anyio.CancelScope(shield=True):
                await offload(database.close, limiter=self._turn)

    def find_file(self, database: sqlite3.Connection, owner: str, file_id: str) -> FileObject | None:
        row = database.execute(
            f"SELECT {FILE} FROM files WHERE id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
            (file_id, owner, time.time()),
        ).fetchone()
        return None if row is None else as_file(row)

    def insert_file(self, database: sqlite3.Connection, owner: str, file: FileObject, written: Path) -> None:
        """Its bytes are in `written`, and on the disk."""
        database.execute(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created, expires) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at),
        )
        add_usage(database, owner, file.bytes)
        os.replace(written, self.content(file.id))
        sync_folder(self.folder / CONTENT)

    async def _with_room(
        self,
        transact: Callable[[Callable[[sqlite3.Connection], None]], Awaitable[None]],
        work: Callable[[sqlite3.Connection], None],
    ) -> None:
        try:
            await transact(work)
        except EngineOverloaded:
            await self.do(lambda database: count(database, "refused"))  # what was refused was rolled back
            raise

    def _remove_file(self, database: sqlite3.Connection, file_id: str) -> None:
        owner, size = database.execute("SELECT owner, bytes FROM files WHERE id = ?", (file_id,)).fetchone()
        database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        add_usage(database, owner, -size)
        self.content(file_id).unlink(missing_ok=True)

    def _check_room(self, database: sqlite3.Connection, owner: str, size: int) -> None:
        (number,) = database.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()
        if number >= self.config.max_files:
            raise EngineOverloaded(f"there are {number} files, which is the most: delete some", retry_after=60.0)
        if usage(database, owner) + size > self.config.max_stored_bytes:
            most = self.config.max_stored_bytes
            raise EngineOverloaded(f"files may have {most} bytes together: delete some", retry_after=60.0)
