"""SQLite databases of the server: how one is opened, and transactions on a thread.

A database is in memory, or in a file that processes share: SQLite keeps them apart.
"""

import logging
import os
import sqlite3
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import anyio
import msgspec

from troupellm.protocol.errors import ConfigError
from troupellm.server.base.errors import HttpError
from troupellm.server.base.threads import offload

logger = logging.getLogger("troupellm.server")

T = TypeVar("T")
P = ParamSpec("P")
StoreT = TypeVar("StoreT", bound="_Transacts")

BUSY_SECONDS = 5.0
"""Seconds that a process waits for another one's transaction."""


class Schema(msgspec.Struct, frozen=True):
    """The tables of a database."""

    setting: str
    """Names the file or its folder."""
    version: int
    tables: str
    """Statements that make those that are not there."""
    synchronous: str
    """FULL: a commit survives a loss of power."""
    later_columns: tuple[tuple[str, str, str], ...] = ()
    """Table, column and definition. A file without them is of the same version, whose rows name their columns."""


def open_database(schema: Schema, path: Path | None) -> Connection:
    """Open the file, or a database in memory, and make its tables. Blocks.

    Raises:
        OSError, sqlite3.Error: it cannot be opened, or is no database.
        ConfigError: it was written by another version.
    """
    if path is not None:  # only its owner may read it, under every umask; SQLite gives its other files the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA foreign_keys = ON")
        if path is not None:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"PRAGMA synchronous = {schema.synchronous}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, schema.version):
            message = f"{schema.setting}: the file is of version {version}, this server writes {schema.version}"
            raise ConfigError(message, param=schema.setting)
        database.executescript(f"BEGIN IMMEDIATE; {schema.tables} PRAGMA user_version = {schema.version}; COMMIT;")
        for table, column, definition in schema.later_columns:
            database.execute("BEGIN IMMEDIATE")
            if column not in [row[1] for row in database.execute(f"PRAGMA table_info({table})")]:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")
            database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def told_as_config_error(setting: str, path: Path) -> Iterator[None]:
    """At the start of a server, the disk's refusal is a mistake in a setting."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{setting}: {path.name} cannot be used: {reason}", param=setting) from None


def add_to(database: Connection, table: str, columns: tuple[str, str], key: str, number: int) -> None:
    """Add to a number in a table of two columns.

    Args:
        columns: of the key and of the number; SQLite before 3.35 needs both.
    """
    key_column, number_column = columns
    database.execute(
        f"INSERT INTO {table} VALUES (?, ?)"
        f" ON CONFLICT ({key_column}) DO UPDATE SET {number_column} = {number_column} + excluded.{number_column}",
        (key, number),
    )


class _Transacts(Protocol):
    def transact(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...

    def read(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...


def transaction(
    work: Callable[Concatenate[StoreT, Connection, P], T],
) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, T]]:
    """A method that is one transaction: its callers leave out the connection and await it, see `Database.transact`."""

    @wraps(work)
    async def method(self: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.transact(lambda database: work(self, database, *args, **kwargs))

    return method


def reading(
    work: Callable[Concatenate[StoreT, Connection, P], T],
) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, T]]:
    """A method that is one transaction and only reads, see `Database.read`."""

    @wraps(work)
    async def method(self: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.read(lambda database: work(self, database, *args, **kwargs))

    return method


class Database:
    """The base of stores. The connection is opened at its first use, and used by one thread at a time."""

    def __init__(self, schema: Schema, path: Path | None, refusal: Callable[[], HttpError]) -> None:
        """refusal: the error of a client whose request the disk refuses."""
        self.errors = 0
        """Operations that the disk has refused to this process."""
        self._schema = schema
        self._path = path
        self._refusal = refusal
        self._database: Connection | None = None
        self._turn = anyio.CapacityLimiter(1)
        self._finalizer: weakref.finalize[..., Database] | None = None

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction on a thread. It is not cut short by cancellation.

        Raises:
            HttpError: 503, the disk refuses, or another process holds the file; see also `require`.
        """
        return await self._transact("BEGIN IMMEDIATE", work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The same for a transaction that only reads: it sees one state, and waits for no other process."""
        return await self._transact("BEGIN", work)

    async def close(self) -> None:
        """Idempotent. In memory, everything is gone then."""
        database, self._database = self._database, None
        if database is not None:
            with anyio.CancelScope(shield=True):
                await offload(database.close, limiter=self._turn)

    def refused(self, error: Exception) -> HttpError:
        """Count and log what the disk has refused; the error for the client."""
        self.errors += 1
        logger.error("%s: %s", self._schema.setting, error)
        return self._refusal()

    def require(self) -> None:
        """Raises an HttpError where the server has no such store."""

    def _open(self) -> Connection:
        return open_database(self._schema, self._path)

    async def _transact(self, begin: str, work: Callable[[Connection], T]) -> T:
        self.require()

        def transact() -> T:
            if self._database is None:
                self._database = self._open()
                self._finalizer = weakref.finalize(self, self._database.close)
            with self._database:  # commits, or rolls back
                self._database.execute(begin)
                return work(self._database)

        try:
            return await offload(transact, limiter=self._turn)
        except (sqlite3.Error, OSError) as error:
            raise self.refused(error) from error
