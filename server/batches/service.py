"""Files and batches as the routes see them."""

from troupellm.protocol.config import ServerConfig
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.batches.metrics import batch_metrics
from troupellm.server.batches.store import Store


class Batches:
    """What one process has of them."""

    def __init__(self, config: ServerConfig) -> None:
        self.store = Store(config)
        self.endpoints: frozenset[str] = frozenset()
        """What lines may ask for."""
        self.uploads = 0
        """Under way."""
        self.runs = False
        """Somebody works on the batches, here or in the engine's process."""

    def require_runner(self) -> None:
        """
        Raises:
            InvalidRequest: nobody would ever work on a batch.
        """
        if self.store.enabled and not self.runs:
            message = "the application that mounts this app does not run its lifespan, so no batch would be worked on"
            raise InvalidRequest(message, code="not_configured")

    async def metrics(self) -> bytes:
        """Prometheus' text format, of the whole folder, whichever process is asked; nothing where there is none."""
        return await batch_metrics(self.store, self.uploads) if self.store.enabled else b""

    async def close(self) -> None:
        await self.store.close()
