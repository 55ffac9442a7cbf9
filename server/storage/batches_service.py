"""Files and batches as the routes see them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from sqlite3 import Connection
from typing import get_args

import msgspec

from troupellm.actors.metrics.families import counter, families, gauge, text_of
from troupellm.protocol.api.batches import BatchStatus
from troupellm.protocol.api.caller import NOBODY
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import EngineOverloaded, InvalidRequest
from troupellm.server.base.errors import HttpError
from troupellm.server.storage.batches import Store
from troupellm.server.storage.batches_rows import OPEN_STATUSES

MAX_UPLOADS = 8
"""At once, in one process."""
MAX_UPLOADS_OF_ONE = 4
"""Of one owner, where there are keys."""


class FolderCounts(msgspec.Struct, frozen=True):
    """Of the whole folder, in every process."""

    files: int = 0
    bytes: int = 0
    refused: int = 0
    batches: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(BatchStatus), 0))
    waiting: int = 0
    """Lines of unfinished batches that have no answer."""
    lines: dict[str, int] = msgspec.field(default_factory=lambda: {"completed": 0, "failed": 0})


_FAMILIES = (
    gauge("files", "Files that are stored.", "files"),
    gauge("files_bytes", "Bytes of files, and of answers to batches.", "bytes"),
    counter("files_refused", "Files refused for want of room.", "refused"),
    gauge("batches", "Batches by status.", "batches", "status"),
    gauge("batch_lines_waiting", "Lines without an answer.", "waiting"),
    counter("batch_lines", "Lines by what came of them.", "lines", "result"),
)
_OWN_FAMILIES = (
    gauge("files_limit_bytes", "Bytes that a key may have.", "store.config.max_stored_bytes"),
    gauge("files_uploading", "Uploads under way in this process.", "uploads"),
    counter("files_errors", "Refusals of the disk.", "store.errors"),
)


class Batches:
    """The batches of one process."""

    def __init__(self, config: ServerConfig) -> None:
        self.store = Store(config)
        self.endpoints: frozenset[str] = frozenset()
        """The routes that lines may ask for."""
        self._uploads: Counter[str] = Counter()
        """Under way, by owner."""
        self.runs = False
        """A runner works on the batches, here or in the engine's process."""

    @property
    def uploads(self) -> int:
        """Under way."""
        return self._uploads.total()

    @contextmanager
    def uploading(self, owner: str) -> Iterator[None]:
        """Around an upload. No owner has all places, so that stalled uploads do not block other owners.

        Raises:
            EngineOverloaded: all places are taken, or the owner's share of them.
        """
        own = MAX_UPLOADS if owner == NOBODY.owner else MAX_UPLOADS_OF_ONE
        for number, most in ((self._uploads[owner], own), (self.uploads, MAX_UPLOADS)):
            if number >= most:
                raise EngineOverloaded(f"{number} files are being uploaded already, which is the most")
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1
            self._uploads += Counter()  # forgets who has none

    def require_runner(self) -> None:
        """
        Raises:
            InvalidRequest: no runner works on batches here.
        """
        if self.store.enabled and not self.runs:
            message = "the application that mounts this app does not run its lifespan, so no batch would be worked on"
            raise InvalidRequest(message, code="not_configured")

    async def metrics(self) -> bytes:
        """Prometheus' text format; empty without a folder."""
        if not self.store.enabled:
            return b""
        try:
            folder = await self.store.read(_read)
        except HttpError:  # counted
            folder = FolderCounts()
        return text_of((*families(_FAMILIES, folder), *families(_OWN_FAMILIES, self)))

    async def close(self) -> None:
        await self.store.close()


def _read(database: Connection) -> FolderCounts:
    none = FolderCounts()
    files, size, waiting = database.execute(
        "SELECT (SELECT count(*) FROM files), (SELECT coalesce(sum(bytes), 0) FROM usage), "
        f"coalesce(sum(total - completed - failed), 0) FROM batches WHERE status IN {OPEN_STATUSES}"
    ).fetchone()
    batches = none.batches | dict(database.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())
    lines = none.lines | dict(database.execute("SELECT name, number FROM counts").fetchall())
    refused = lines.pop("refused", 0)
    return FolderCounts(files=files, bytes=size, refused=refused, batches=batches, waiting=waiting, lines=lines)
