"""From a submission to a request of the scheduler: refusals, aborts that came first, sequences, and deadlines."""

from array import array
from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush

from troupellm.actors.kv_cache.block_hash import namespace, owner_name, split_keys
from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_cache.state_tables import snapshot_places
from troupellm.actors.scheduler.waiting_queue import arrival_key
from troupellm.actors.sequences.beam_search import BeamSearch
from troupellm.actors.sequences.sequence import Request, Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.tenant import TenantConfig
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, context_sentence
from troupellm.protocol.messages.cache_groups import capacity_tokens, count_beam_blocks
from troupellm.protocol.messages.media import block_marks
from troupellm.protocol.messages.scheduler import BeamSettings, SubmitRequest
from troupellm.protocol.messages.worker import WorkerReady

_EARLY_ABORTS = 1024
"""How many aborts of unknown requests are remembered: they overtake a submission by milliseconds."""
_PRIORITY_SPAN = 2**33
"""More than priorities of requests differ by: that of the tenant counts before them."""


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


def _prompt_keys(message: SubmitRequest, tables: BlockTables) -> list[bytes]:
    """Keys of the prompt's blocks, as the input processor made them, or made here where it made none."""
    if not tables.caching:
        return []
    keys = message.prompt_keys
    if not keys:
        owner = namespace(tenant=message.tenant, cache_salt=message.cache_salt, adapter=_digest(message))
        keys = tables.hasher.prompt_keys(owner, message.prompt, block_marks(message.media, tables.block_size))
    return split_keys(keys)


def owner_of(message: SubmitRequest) -> str:
    """As `NewRow.tenant`: data kept of an adapter's tokens say nothing about those of the model or of another one."""
    return owner_name(tenant=message.tenant, cache_salt=message.cache_salt, adapter=_digest(message))


def _digest(message: SubmitRequest) -> str:
    return "" if message.adapter is None else message.adapter.digest


def make_request(
    message: SubmitRequest,
    ready: WorkerReady,
    config: SchedulerConfig,
    tenants: Mapping[str, TenantConfig],
    tables: BlockTables,
    number: int,
) -> Request:
    """A request with its sequences, and its beam search if it asks for one.

    Args:
        tenants: those with settings of their own, by name.
        number: counts submissions.
    """
    policy, known = config.scheduling_policy, tenants.get(message.tenant)
    priority = message.priority + (0 if known is None else known.priority * _PRIORITY_SPAN)
    request = Request(message, _prompt_keys(message, tables), tenant=message.tenant if policy == "fair" else "")
    if message.media:
        request.marks = block_marks(message.media, tables.block_size)
    if tables.states is not None:
        borders = (*message.borders, *[lease.tokens for lease in message.leases])
        request.borders = snapshot_places(borders, request.num_prompt_tokens, tables.block_size)
    limit = min(request.num_prompt_tokens + message.max_tokens, ready.max_model_len)
    if message.pooling is not None:  # nothing comes behind the prompt, which may fill the context
        limit = request.num_prompt_tokens + 1
    request.sequences = tuple(
        Sequence(
            request,
            spec.row,
            spec.sampling,
            array("i", message.prompt + spec.generated),
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
    return request


def find_refusal(message: SubmitRequest, ready: WorkerReady, config: SchedulerConfig) -> InvalidRequest | None:
    """Why a request is refused; None lets it in."""
    num_prompt = len(message.prompt) // 4
    if not num_prompt:
        return InvalidRequest("the prompt has no tokens", param="prompt")
    if message.max_tokens < 1:
        return InvalidRequest(f"max_tokens must be at least 1, got {message.max_tokens}", param="max_tokens")
    room = ready.max_model_len
    if message.pooling is not None:
        return _pooling_refusal(num_prompt, ready, config)
    if num_prompt >= room:
        return ContextLengthExceeded(
            f"{context_sentence(room)} However, the prompt has {num_prompt} tokens, which leave no room for an answer.",
            limit=room,
            got=num_prompt,
        )
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and num_prompt > budget:
        return ContextLengthExceeded(
            f"{context_sentence(budget, 'a step takes no more, and chunked prefill is off')}"
            f" However, the prompt has {num_prompt} tokens.",
            limit=budget,
            got=num_prompt,
        )
    wanted = min(num_prompt + message.max_tokens, room) - 1  # the last token is never computed
    capacity = capacity_tokens(ready, config.max_num_batched_tokens)
    if wanted > capacity:
        return ContextLengthExceeded(
            f"{context_sentence(capacity, 'the KV cache holds no more')}"
            f" However, prompt and max_tokens need {wanted} tokens.",
            limit=capacity,
            got=wanted,
            answer_tokens=max(0, wanted - num_prompt),
        )
    return None if message.beam is None else _beam_refusal(message, message.beam, ready, config, wanted)


def _pooling_refusal(num_prompt: int, ready: WorkerReady, config: SchedulerConfig) -> InvalidRequest | None:
    """Only the prompt is computed, but for some models at once."""
    limits = [ready.max_model_len, capacity_tokens(ready, config.max_num_batched_tokens)]
    if ready.whole_prompts or not config.enable_chunked_prefill:
        limits.append(config.max_num_batched_tokens)
    limit = min(limits)
    if num_prompt <= limit:
        return None
    return ContextLengthExceeded(
        f"{context_sentence(limit)} However, the prompt has {num_prompt} tokens; no more can be pooled.",
        limit=limit,
        got=num_prompt,
    )


def _beam_refusal(
    message: SubmitRequest, beam: BeamSettings, ready: WorkerReady, config: SchedulerConfig, wanted: int
) -> InvalidRequest | None:
    """Beams advance together, so all of them must fit at once; the prompt's full blocks they share."""
    width = len(message.sequences)
    if width > config.max_num_seqs:
        return InvalidRequest(
            f"n must be at most max_num_seqs ({config.max_num_seqs}) with use_beam_search, got {width}", param="n"
        )
    if beam.num_candidates > ready.vocab_width:
        return InvalidRequest(
            f"n is too large for use_beam_search: a step would look at {beam.num_candidates} tokens of"
            f" {ready.vocab_width}",
            param="n",
        )
    if beam.num_candidates < width + len(message.stop_token_ids | message.eos_token_ids):
        return InvalidRequest("too many tokens end a sequence for use_beam_search", param="stop_token_ids")
    size, groups = ready.block_size, len(ready.groups)
    blocks = count_beam_blocks(groups, len(message.prompt) // 4, wanted, width, size)
    if blocks > ready.num_blocks:
        needed, whole = blocks * size // groups, ready.num_blocks * size // groups
        return ContextLengthExceeded(
            f"{context_sentence(whole // width, f'with {width} beams')}"
            f" However, {width} beams need {needed} tokens of KV cache; the whole cache has {whole}.",
            limit=whole,
            got=needed,
            param="n",
        )
    return None


_SPARE = 64
"""Deadlines of requests that have ended are kept up to so many more than there are requests."""


class Deadlines:
    """Seconds on the clock of plans."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self.next: float | None = None
        """When the next waiting request may have to be dropped."""

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._heap)

    def add(self, deadline: float, request: int, open_requests: Container[int], num_open: int) -> None:
        heappush(self._heap, (deadline, request))
        if len(self._heap) > 2 * num_open + _SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in open_requests]
            heapify(self._heap)
        self.next = self._heap[0][0]

    def passed(self, now: float) -> list[int]:
        """Requests whose deadline is over, each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[1])
        self.next = self._heap[0][0] if self._heap else None
        return found
