"""Computes the common prompt of a request's sequences once: forks share its blocks and copy those that they write to.

The first sequence of a request computes the prompt. The moment that is done the request takes a reference of its own to
those blocks, its *shared prompt*, so that they are there for the others even if the first one ends at once and nothing
is cached. A fork shares the shared prompt's full blocks; the one block that it begins to write in, it copies first.
"""

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.sequences.parts import SharedPrompt
from troupellm.actors.sequences.sequence import Request, Sequence, State
from troupellm.protocol.messages.worker import NULL_BLOCK

_WITHOUT_BLOCKS = frozenset({State.WAITING, State.PREEMPTED, State.HELD})


class SharedPrompts:
    """The references that requests hold for sequences which have no blocks yet."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._requests: dict[int, Request] = {}

    def hold(self, sequence: Sequence) -> None:
        """Keep what a sequence has computed of the tokens that all of its request begin with."""
        request = sequence.request
        if self._tables.states is not None:  # a fork begins behind a snapshot, like any other sequence
            return
        common = request.num_prompt_tokens if request.search is None else _common_length(request)
        shared = min(common, sequence.num_computed)
        blocks = self._tables.blocks_for(shared)
        self.drop(request)
        shared_prompt = SharedPrompt([table[:blocks] for table in sequence.tables], shared, sequence.cache_age)
        if not all(_covers(self._tables, other, shared_prompt) for other in request.sequences if other is not sequence):
            return  # it has gone on, and a window with it: the others look for what is cached
        self._tables.share(shared_prompt.tables)
        request.shared_prompt = shared_prompt
        self._requests[request.number] = request

    def settle(self, request: Request) -> None:
        """Let go of a request's shared prompt once no sequence waits for it."""
        if all(other.state not in _WITHOUT_BLOCKS for other in request.sequences):
            self.drop(request)

    def release_youngest(self) -> bool:
        """Give a shared prompt's blocks back under pressure; waiting forks compute them again. False if there is no
        shared prompt."""
        if not self._requests:
            return False
        self.drop(max(self._requests.values(), key=lambda request: request.sequences[0].arrival_key))
        return True

    def holders(self) -> list[list[list[int]]]:
        """The tables of all shared prompts."""
        return [
            request.shared_prompt.tables for request in self._requests.values() if request.shared_prompt is not None
        ]

    def assert_invariants(self) -> None:
        for request in self._requests.values():
            waiting = [sequence for sequence in request.sequences if sequence.state in _WITHOUT_BLOCKS]
            assert waiting, "a shared prompt is kept for nobody"

    def forget(self) -> None:
        """The blocks are gone, and the pools with them."""
        for request in self._requests.values():
            request.shared_prompt = None
        self._requests.clear()

    def drop(self, request: Request) -> None:
        """Idempotent."""
        shared_prompt, request.shared_prompt = request.shared_prompt, None
        if shared_prompt is not None:
            del self._requests[request.number]
            self._tables.release(shared_prompt.tables)


def find_shared_prompt(sequence: Sequence, tables: BlockTables) -> SharedPrompt | None:
    """Where a sequence that starts finds what others of its request have computed for it."""
    request = sequence.request
    if tables.states is not None:
        return None
    if request.shared_prompt is not None:
        return request.shared_prompt if _covers(tables, sequence, request.shared_prompt) else None
    prompt = request.num_prompt_tokens
    for other in request.sequences:
        # Only of one that has come back: what the others hold may be on its way, by copies of this very step.
        if other is not sequence and other.capacity and other.decoding and other.num_confirmed >= prompt:
            shared_prompt = SharedPrompt(other.tables, prompt, other.cache_age)
            if _covers(tables, sequence, shared_prompt):
                return shared_prompt
    return None


def _covers(tables: BlockTables, sequence: Sequence, shared_prompt: SharedPrompt) -> bool:
    """Whether a shared prompt still has all that a sequence would see that starts behind it."""
    start, size = min(shared_prompt.num_positions, len(sequence.tokens) - 1), tables.block_size
    for window, table in zip(tables.windows_of(sequence), shared_prompt.tables, strict=True):
        first = 0 if window is None else max(0, start + 1 - window) // size
        if first * size < start and table[first] == NULL_BLOCK:
            return False
    return True


def _common_length(request: Request) -> int:
    """How many tokens all sequences begin with. The extremes in dictionary order differ where any two do."""
    texts = [sequence.tokens for sequence in request.sequences]
    first, last = min(texts), max(texts)
    for index in range(request.num_prompt_tokens, min(len(first), len(last))):
        if first[index] != last[index]:
            return index
    return min(len(first), len(last))
