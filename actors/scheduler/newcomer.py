"""What the scheduler does with a submission before it is a request."""

from troupellm.actors.prefix_keys import namespace, split_keys
from troupellm.actors.scheduler.block_tables import BlockTables
from troupellm.protocol.scheduler import SubmitRequest

_EARLY_ABORTS = 1024
"""How many aborts of unknown requests are remembered: they overtake a submission by milliseconds."""


class EarlyAborts:
    """Requests that were aborted before they came."""

    def __init__(self) -> None:
        self._requests: dict[int, None] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def add(self, request: int) -> None:
        self._requests[request] = None
        if len(self._requests) > _EARLY_ABORTS:
            del self._requests[next(iter(self._requests))]

    def take(self, request: int) -> bool:
        """Whether it was aborted; said once."""
        return request in self._requests and self._requests.pop(request) is None


def prompt_keys(message: SubmitRequest, tables: BlockTables) -> list[bytes]:
    """Those that the input processor made; who speaks to the scheduler directly need not make any."""
    if not tables.caching:
        return []
    keys = message.prompt_keys
    if not keys:
        owner = namespace(tenant=message.tenant, cache_salt=message.cache_salt)
        keys = tables.hasher.prompt_keys(owner, message.prompt)
    return split_keys(keys)
