"""The results of a batch so far, as its runner stores them."""

import time
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import anyio
import msgspec

from troupellm.protocol.api.batches import Batch, BatchError, BatchErrors, BatchResult, BatchStatus, FileObject
from troupellm.server.base.private_files import create_private, new_name, sync
from troupellm.server.base.threads import offload
from troupellm.server.batches.lines import failed, is_good
from troupellm.server.storage.batches import Store, new_file
from troupellm.server.storage.batches_rows import BATCH, OPEN_STATUSES, add_usage, as_batch, count, save_batch, usage
from troupellm.server.storage.database import reading, transaction

_CHUNK = 256
"""Results that are copied into a file at once."""


class Entry(msgspec.Struct, frozen=True):
    """A batch that is not over."""

    number: int
    owner: str
    life: int | None
    batch: Batch

    @property
    def expired(self) -> bool:
        return self.batch.expires_at is not None and time.time() >= self.batch.expires_at


async def unfinished(store: Store) -> list[Entry]:
    """Oldest first."""
    query = f"SELECT number, owner, life, {BATCH} FROM batches WHERE status IN {OPEN_STATUSES} ORDER BY number"
    rows = await store.read(lambda database: database.execute(query).fetchall())
    return [Entry(number, owner, life, as_batch(tuple(rest))) for number, owner, life, *rest in rows]


def whole_batch(code: str, message: str) -> BatchErrors:
    """The error of a batch none of whose lines is run."""
    return BatchErrors(data=[BatchError(code=code, message=message)])


class Progress:
    """Of one batch. Results that come together are written together."""

    def __init__(self, store: Store, entry: Entry) -> None:
        self.store, self.transact, self.read = store, store.transact, store.read
        self.entry = entry
        self._pending: list[tuple[int, BatchResult]] = []
        self._writing = anyio.Lock()

    @transaction
    def set_status(
        self, database: Connection, /, status: BatchStatus, *, total: int | None = None, **fields: object
    ) -> Batch:
        """Change a batch, unless it is being cancelled, which only `cancelled` follows."""
        batch = self._read(database)
        if batch.status == "cancelling" and status != "cancelled":
            return batch
        changed = msgspec.structs.replace(batch, status=status, **{f"{status}_at": int(time.time())}, **fields)
        save_batch(database, changed)
        if total is not None:
            database.execute("UPDATE batches SET total = ? WHERE number = ?", (total, self.entry.number))
        return changed

    @reading
    def answered(self, database: Connection) -> set[int]:
        """Lines that have a result."""
        rows = database.execute("SELECT line FROM results WHERE batch = ?", (self.entry.number,)).fetchall()
        return {line for (line,) in rows}

    async def put(self, line: int, result: BatchResult) -> None:
        """Keep a result; it is on the disk when this returns."""
        self._pending.append((line, result))
        async with self._writing:
            if self._pending:  # the writer before has not taken these along
                taken, self._pending = self._pending, []
                await self.transact(partial(self._write, results=taken))

    async def put_all(self, results: list[tuple[int, BatchResult]]) -> None:
        """Many at once."""
        for first in range(0, len(results), _CHUNK):
            await self.transact(partial(self._write, results=results[first : first + _CHUNK]))

    def _write(self, database: Connection, results: list[tuple[int, BatchResult]]) -> None:
        number, owner = self.entry.number, self.entry.owner
        room = self.store.config.max_stored_bytes - usage(database, owner)
        written = good = size = 0
        for line, result in results:
            data = msgspec.json.encode(result)
            if size + len(data) > room:
                result = failed(result.custom_id, "storage_full", "the answer does not fit: the key's files are full")
                data = msgspec.json.encode(result)
            fresh = database.execute(
                "INSERT OR IGNORE INTO results (batch, line, good, data) VALUES (?, ?, ?, ?)",
                (number, line, is_good(result), data),
            ).rowcount
            written += fresh
            good += fresh * is_good(result)
            size += fresh * len(data)
        add_usage(database, owner, size)
        count(database, "completed", good)
        count(database, "failed", written - good)
        database.execute(
            "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE number = ?",
            (good, written - good, number),
        )

    async def finish(self, status: BatchStatus) -> None:
        """Make the output files, in the order of the input, and end the batch. May be called again after a crash.

        Raises:
            HttpError: the disk refuses.
        """
        written: dict[bool, Path] = {good: self.store.incoming(new_name()) for good in (True, False)}
        try:
            sizes = {good: await self._copy(good, path) for good, path in written.items()}
            names = {good: f"{self.entry.batch.id}_{'output' if good else 'error'}.jsonl" for good in sizes}
            new = partial(new_file, purpose="batch_output", life=self.entry.life)
            files = {good: new(names[good], size) for good, size in sizes.items() if size}
            await self._close(status, files, written)
        except OSError as error:
            raise self.store.refused(error) from error
        finally:
            for path in written.values():
                path.unlink(missing_ok=True)

    async def _copy(self, good: bool, path: Path) -> int:
        """Bytes that were written."""
        size, last = 0, 0
        with await offload(create_private, path) as output:
            while rows := await self._results(good, last):
                last = rows[-1][0]
                data = b"".join([row[1] + b"\n" for row in rows])
                size += len(data)
                await offload(output.write, data)
            await offload(sync, output)
        return size

    @reading
    def _results(self, database: Connection, good: bool, after: int) -> list[tuple[int, bytes]]:
        return database.execute(
            "SELECT line, data FROM results WHERE batch = ? AND good = ? AND line > ? ORDER BY line LIMIT ?",
            (self.entry.number, good, after, _CHUNK),
        ).fetchall()

    @transaction
    def _close(
        self, database: Connection, status: BatchStatus, files: dict[bool, FileObject], written: dict[bool, Path]
    ) -> None:
        key = (self.entry.number,)
        (held,) = database.execute("SELECT coalesce(sum(length(data)), 0) FROM results WHERE batch = ?", key).fetchone()
        add_usage(database, self.entry.owner, -held)
        database.execute("DELETE FROM results WHERE batch = ?", key)
        for good, file in files.items():
            self.store.insert_file(database, self.entry.owner, file, written[good])
        names = {"output_file_id" if good else "error_file_id": file.id for good, file in files.items()}
        ended: dict[str, Any] = {**names, "status": status, f"{status}_at": int(time.time())}
        save_batch(database, msgspec.structs.replace(self._read(database), **ended))

    def _read(self, database: Connection) -> Batch:
        row = database.execute(f"SELECT {BATCH} FROM batches WHERE number = ?", (self.entry.number,)).fetchone()
        return as_batch(row)
