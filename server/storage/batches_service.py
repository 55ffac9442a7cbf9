"""Files and batches as the routes see them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from troupellm.protocol.api.caller import NOBODY
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import EngineOverloaded, InvalidRequest
from troupellm.server.storage.batches import Store
from troupellm.server.storage.batches_metrics import batch_metrics

MAX_UPLOADS = 8
"""At once, in one process."""
MAX_UPLOADS_OF_ONE = 4
"""Of one owner, where there are keys."""


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
        """Prometheus' text format, of the whole folder, in every process; empty without a folder."""
        return await batch_metrics(self.store, self.uploads) if self.store.enabled else b""

    async def close(self) -> None:
        await self.store.close()
