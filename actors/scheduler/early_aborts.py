"""Turns a submission into a request of the scheduler."""

from array import array

from troupellm.actors.kv_cache.block_hash import namespace, split_keys
from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.waiting_queue import arrival_key
from troupellm.actors.sequences.beam_search import BeamSearch
from troupellm.actors.sequences.sequence import Request, Sequence
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.protocol.messages.worker import WorkerReady

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


def fill(
    request: Request, message: SubmitRequest, ready: WorkerReady, *, policy: str, priority: int, number: int
) -> None:
    """Give a request its sequences, and its beam search if it asks for one.

    Args:
        priority: of the request, that of its tenant included.
        number: counts submissions.
    """
    tokens = array("i", message.prompt)
    limit = min(request.num_prompt_tokens + message.max_tokens, ready.max_model_len)
    if message.pooling is not None:  # nothing comes behind the prompt, which may fill the context
        limit = request.num_prompt_tokens + 1
    request.sequences = tuple(
        Sequence(
            request,
            spec.row,
            spec.sampling,
            tokens[:],
            message,
            limit=limit,
            num_groups=len(ready.groups),
            arrival_key=arrival_key(policy, priority, number, index),
        )
        for index, spec in enumerate(message.sequences)
    )
    if message.beam is not None:
        request.search = BeamSearch(
            message.beam,
            len(message.sequences),
            num_prompt_tokens=request.num_prompt_tokens,
            limit=limit,
            stops=request.stop_or_eos,
        )
