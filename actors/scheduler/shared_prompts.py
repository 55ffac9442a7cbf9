"""Computes the common prompt of a request's sequences once: forks share its blocks and copy those that they write to.

The first sequence of a request computes the prompt. The moment that is done the request takes a reference of its own to
those blocks, its *trunk*, so that they are there for the others even if the first one ends at once and nothing is
cached. A fork shares the trunk's full blocks; the one block that it begins to write in, it copies first.
"""

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.sequences.parts import Trunk
from troupellm.actors.sequences.sequence import Request, Sequence, State

_WITHOUT_BLOCKS = frozenset({State.WAITING, State.PREEMPTED, State.HELD})


class Trunks:
    """The references that requests hold for sequences which have no blocks yet."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._requests: dict[int, Request] = {}

    def hold(self, sequence: Sequence) -> None:
        """Keep what a sequence has computed of the tokens that all of its request begin with."""
        request = sequence.request
        common = request.num_prompt_tokens if request.search is None else _common_length(request)
        shared = min(common, sequence.num_computed)
        blocks = self._tables.blocks_for(shared)
        self.drop(request)
        trunk = Trunk([table[:blocks] for table in sequence.tables], shared, sequence.cache_age)
        if not all(self._tables.covers(other, trunk) for other in request.sequences if other is not sequence):
            return  # it has gone on, and a window with it: the others look for what is cached
        self._tables.share(trunk.tables)
        request.trunk = trunk
        self._requests[request.number] = request

    def settle(self, request: Request) -> None:
        """Let go of a request's trunk once no sequence waits for it."""
        if all(other.state not in _WITHOUT_BLOCKS for other in request.sequences):
            self.drop(request)

    def release_youngest(self) -> bool:
        """Give a trunk's blocks back under pressure; waiting forks compute them again. False if there is no trunk."""
        if not self._requests:
            return False
        self.drop(max(self._requests.values(), key=lambda request: request.sequences[0].arrival_key))
        return True

    def holders(self) -> list[list[list[int]]]:
        """The tables of all trunks."""
        return [request.trunk.tables for request in self._requests.values() if request.trunk is not None]

    def assert_invariants(self) -> None:
        for request in self._requests.values():
            waiting = [sequence for sequence in request.sequences if sequence.state in _WITHOUT_BLOCKS]
            assert waiting, "a trunk is kept for nobody"

    def forget(self) -> None:
        """The blocks are gone, and the pools with them."""
        for request in self._requests.values():
            request.trunk = None
        self._requests.clear()

    def drop(self, request: Request) -> None:
        """Idempotent."""
        trunk, request.trunk = request.trunk, None
        if trunk is not None:
            del self._requests[request.number]
            self._tables.release(trunk.tables)


def find_trunk(sequence: Sequence, tables: BlockTables) -> Trunk | None:
    """Where a sequence that starts finds what others of its request have computed for it."""
    request = sequence.request
    if request.trunk is not None:
        return request.trunk if tables.covers(sequence, request.trunk) else None
    prompt = request.num_prompt_tokens
    for other in request.sequences:
        # Only of one that has come back: what the others hold may be on its way, by copies of this very step.
        if other is not sequence and other.capacity and other.decoding and other.num_confirmed >= prompt:
            trunk = Trunk(other.tables, prompt, other.cache_age)
            if tables.covers(sequence, trunk):
                return trunk
    return None


def _common_length(request: Request) -> int:
    """How many tokens all sequences begin with. The extremes in dictionary order differ where any two do."""
    texts = [sequence.tokens for sequence in request.sequences]
    first, last = min(texts), max(texts)
    for index in range(request.num_prompt_tokens, min(len(first), len(last))):
        if first[index] != last[index]:
            return index
    return min(len(first), len(last))
