"""Responses that can be asked for later: one SQLite database, in memory or in a file that processes share.

Everything is bounded: the number of responses, their bytes, and their age. The owner that stored most loses its
least recently used first, so no owner pushes out the others' responses.

A response is found by its id *and* its owner: another key's response does not exist.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection

import anyio
import msgspec

from troupellm.actors.metrics.families import counter, families, gauge, text_of
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.base.errors import HttpError, not_ready
from troupellm.server.storage.conversation_rows import Bounds
from troupellm.server.storage.database import Database, transaction
from troupellm.server.storage.responses_rows import StoredResponse, evict, read_row, size_of
from troupellm.server.storage.responses_schema import SCHEMA

_UNREADABLE = "stored responses cannot be read or written now"


class TooMuchError(Exception):
    """More was asked for at once than may be read at once."""


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All but the errors are of the whole database, in every process."""

    stored: int = 0
    bytes: int = 0
    running: int = 0
    """In the background, in all processes."""
    evicted: dict[str, int] = {}
    """By reason, since the database was made."""
    errors: int = 0


def _evicted(counts: StoreCounts) -> dict[str, int]:
    return {reason: counts.evicted.get(reason, 0) for reason in ("expired", "entries", "bytes")}


_FAMILIES = (
    gauge("responses_stored", "Responses that are kept.", "stored"),
    gauge("responses_stored_bytes", "Bytes of these.", "bytes"),
    gauge("responses_background", "Background responses that run.", "running"),
    counter("responses_evicted", "Responses not kept any more.", _evicted, "reason"),
    counter("responses_store_errors", "Failures to write or read.", "errors"),
)


class ResponseStore(Database):
    """`put`, `get` and their kin raise HttpError 503 where the disk is full, or another process holds the file."""

    def __init__(self, config: ServerConfig) -> None:
        path = config.responses_store
        refusal = partial(not_ready, _UNREADABLE, code="server_is_overloaded")
        super().__init__(SCHEMA, None if path is None else Path(path), refusal)
        self._entries = config.responses_store_entries
        self._bytes = config.responses_store_bytes
        self._seconds = config.responses_ttl
        self._most_body = config.max_body_bytes
        self._log_bytes = self._bytes // max(config.max_background_responses, 1)
        self.enabled = self._entries > 0 and (path is not None or config.api_server_count < 2)
        """False with several API processes and no file: each would know its own responses only."""
        self.shared = path is not None
        """Other processes may see, cancel and delete what this one runs."""
        self._runner = secrets.token_hex(16)
        """This process, among those that share the database."""
        self.decoding = anyio.CapacityLimiter(1)
        """Limits the decoding of stored conversations to one at a time, since a short request may ask for much."""

    @property
    def bounds(self) -> Bounds:
        """Of conversations, which are kept beside the responses."""
        return Bounds(self._entries, self._bytes, min(self._bytes, self._most_body), self._seconds)

    async def open(self) -> None:
        """Open the file now and not at its first use, if that works."""
        if self.shared:
            with suppress(HttpError):
                await self.transact(lambda database: None)

    def fits(self, stored: StoredResponse) -> bool:
        """False where it could not be kept if there were no other."""
        return stored.size <= self._bytes

    async def put(self, owner: str, stored: StoredResponse) -> bool:
        """Keep a response; False where there is no room for it, unless others' responses went."""
        if not self.fits(stored):
            return False

        def write(database: Connection) -> bool:
            now = time.time()
            database.execute(
                "INSERT INTO responses (id, owner, previous, status, background, logged, body, items, bytes, used, "
                "expires, runner, lease, border) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id,
                    owner,
                    stored.previous,
                    stored.status,
                    stored.background,
                    stored.logged,
                    stored.body,
                    stored.items,
                    stored.size,
                    now,
                    now + self._seconds,
                    self._runner,
                    time.monotonic(),
                    stored.border,
                ),
            )
            evict(database, now, self._entries, self._bytes)
            left = database.execute("SELECT 1 FROM responses WHERE id = ?", (stored.id,)).fetchone()
            return left is not None

        return await self.transact(write)

    @transaction
    def get(self, database: Connection, owner: str, name: str) -> StoredResponse | None:
        return read_row(database, owner, name)

    @transaction
    def chain(self, database: Connection, owner: str, name: str, most: int, most_bytes: int) -> list[StoredResponse]:
        """A response and all before it, oldest first. Nothing is read unless all of it may be.

        Raises:
            KeyError: one of them is not there (any more); its id is the error's argument.
            OverflowError: there are more than `most`.
            TooMuchError: they have more than `most_bytes`.
        """
        names: list[str] = []
        wanted: str | None = name
        room = most_bytes
        while wanted is not None:
            if len(names) >= most:
                raise OverflowError
            row = size_of(database, owner, wanted)
            if row is None:
                raise KeyError(wanted)
            names.append(wanted)
            wanted, size = row
            room -= size
            if room < 0:
                raise TooMuchError
        return list(_several(database, owner, names[::-1]).values())

    @transaction
    def conversation(self, database: Connection, owner: str, name: str, most_bytes: int) -> StoredResponse | None:
        """A conversation that is kept.

        Raises:
            TooMuchError: it has more than `most_bytes`, and was not read.
        """
        size = size_of(database, owner, name, conversation=True)
        if size is not None and size[1] > most_bytes:
            raise TooMuchError
        return read_row(database, owner, name, conversation=True)

    @transaction
    def several(
        self, database: Connection, owner: str, names: Sequence[str], most_bytes: int
    ) -> dict[str, StoredResponse]:
        """Those of these that are there.

        Raises:
            TooMuchError: they have more than `most_bytes`, and nothing was read.
        """
        rows = [size_of(database, owner, name) for name in names]
        if sum(row[1] for row in rows if row is not None) > most_bytes:
            raise TooMuchError
        return _several(database, owner, names)

    @transaction
    def update(self, database: Connection, owner: str, name: str, status: str, body: bytes) -> bool:
        """Write a running response anew; False where it runs no more, or is gone."""
        changed = database.execute(
            "UPDATE responses SET status = ?, bytes = bytes - length(body) + ?, body = ? WHERE id = ? AND "
            "owner = ? AND status IN ('queued', 'in_progress')",
            (status, len(body), body, name, owner),
        ).rowcount
        evict(database, time.time(), self._entries, self._bytes)
        return changed > 0

    @transaction
    def delete(self, database: Connection, owner: str, name: str, *, conversation: bool = False) -> bool:
        found = read_row(database, owner, name, conversation=conversation) is not None
        if found:
            database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (name, owner))
        return found

    @transaction
    def log(self, database: Connection, name: str, first: int, events: bytes) -> None:
        """Keep events of a running response; `first` is the number of the first of them.

        Logs may take as many bytes together as all responses that have ended, and each its share of that: one that
        grows beyond it is dropped, and what is generated is not.
        """
        row = database.execute("SELECT bytes FROM responses WHERE id = ? AND logged", (name,)).fetchone()
        if row is None:
            return
        size = row[0] + len(events)
        if size <= self._log_bytes:
            database.execute("UPDATE responses SET bytes = ? WHERE id = ?", (size, name))
            database.execute("INSERT INTO events (id, first, data) VALUES (?, ?, ?)", (name, first, events))
            return
        database.execute("DELETE FROM events WHERE id = ?", (name,))
        database.execute("UPDATE responses SET logged = 0, bytes = length(body) + length(items) WHERE id = ?", (name,))

    @transaction
    def logged(
        self, database: Connection, owner: str, name: str, number: int
    ) -> tuple[StoredResponse | None, list[tuple[int, bytes]]]:
        """A response, and what was logged of it from event `number` on (and perhaps some before)."""
        stored = read_row(database, owner, name)  # first: what is logged later is found the next time
        rows = database.execute(
            "SELECT first, data FROM events WHERE id = ? AND first >= "
            "(SELECT coalesce(max(first), 0) FROM events WHERE id = ? AND first <= ?) ORDER BY first",
            (name, name, number),
        ).fetchall()
        return stored, rows if stored is not None else []

    @transaction
    def renew(self, database: Connection, name: str) -> bool:
        """Say that a response of this process runs; False where it should no more."""
        changed = database.execute(
            "UPDATE responses SET lease = ? WHERE id = ? AND runner = ? AND status IN ('queued', 'in_progress')",
            (time.monotonic(), name, self._runner),
        ).rowcount
        return changed > 0

    async def counts(self) -> StoreCounts:
        def read(database: Connection) -> StoreCounts:
            evict(database, time.time(), self._entries, self._bytes)
            stored, size, running = database.execute(
                "SELECT count(*), coalesce(sum(bytes), 0), coalesce(sum(status IN ('queued', 'in_progress')), 0) "
                "FROM responses"
            ).fetchone()
            evicted = dict(database.execute("SELECT reason, number FROM evictions").fetchall())
            return StoreCounts(stored=stored, bytes=size, running=running, evicted=evicted, errors=self.errors)

        if self._database is None and not self.shared:
            return StoreCounts(errors=self.errors)  # unused: do not start a thread for a scrape
        return await self.transact(read)

    async def metrics(self) -> bytes:
        """Prometheus' text format."""
        try:
            counts = await self.counts()
        except HttpError:
            counts = StoreCounts(errors=self.errors)
        return text_of(families(_FAMILIES, counts))


def _several(database: Connection, owner: str, names: Sequence[str]) -> dict[str, StoredResponse]:
    found = [(name, read_row(database, owner, name)) for name in names]
    return {name: stored for name, stored in found if stored is not None}
