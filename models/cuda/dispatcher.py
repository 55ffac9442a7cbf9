"""Which graph computes a step, and which one is captured next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

EAGER_STEPS = 1
"""Of one token per row that go ahead of the first capture."""
BETWEEN_CAPTURES = 4
"""Steps from one capture that nobody waits for to the next: requests go on in the meantime."""


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What the shape of a step depends on."""

    tokens: int
    requests: int
    uniform: bool
    """Every row has as many tokens as any other."""
    adapters: bool = False
    """Some row computes with an adapter."""

    @property
    def queries(self) -> int:
        """Tokens of each row of a uniform step."""
        return self.tokens // self.requests


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph."""

    requests: int
    """Rows, those that pad included."""
    queries: int = 1
    """Tokens of each row; more than one verifies drafts."""
    draws: bool = False
    """Tokens may be drawn; else every row takes the likeliest."""

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.requests * self.queries


VERIFIED_TOKENS = 256
"""Of a graph that verifies drafts, those of all rows: its logits are kept, and larger batches draft little."""
FREE_TOKENS = 64
"""So many are hardly dearer than one, since it is the weights that a small step waits for: rows may pad up to there."""


def default_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own, for up to `most` rows: small ones closely, large ones in steps of 16."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    return tuple(size for size in sizes if size < most) + tuple(size for size in sizes if size >= most)[:1]


class Dispatcher:
    """Knows which graphs there may be, and which there are."""

    def __init__(self, sizes: Iterable[int], *, queries: Iterable[int] = (1,), draws: bool = True) -> None:
        """
        Args:
            sizes: batch sizes to capture; none is to stay eager.
            queries: tokens per row of uniform steps.
            draws: whether graphs draw tokens; else whoever looks at their logits does.
        """
        self._sizes = tuple(sorted(set(sizes)))
        self._queries = tuple(sorted(set(queries)))
        shapes = [
            GraphKey(size, count)
            for count in self._queries
            for size in reversed(self._sizes)
            if count == 1 or size * count <= VERIFIED_TOKENS
        ]
        shapes.sort(key=lambda shape: -shape.tokens)
        drawing = [replace(shape, draws=True) for shape in shapes if draws and shape.queries == 1]
        self._all = (*shapes, *drawing)
        self._waiting = list(self._all)
        self._possible = frozenset(self._all)
        self._captured: set[GraphKey] = set()
        self._steps = 0

    def key(self, batch: BatchDescriptor, *, draws: bool) -> GraphKey | None:
        """The graph that such a step would be computed with, captured or not; None where it must be eager."""
        if not batch.uniform or batch.adapters or not batch.requests or batch.queries not in self._queries:
            return None
        size = next((size for size in self._sizes if size >= batch.requests), None)
        found = None if size is None else GraphKey(size, batch.queries, draws)
        return found if found in self._possible else None

    def verifying(self, batch: BatchDescriptor, longest: int, *, pads: bool) -> GraphKey | None:
        """The graph for rows that have up to `longest` tokens each, drafts among them; None where it must be eager.

        Args:
            batch: `uniform` where every row has `longest`.
            pads: shorter rows may be filled up.
        """
        if not (batch.uniform or pads) or not batch.requests:
            return None
        for queries in self._queries:
            if queries < longest or (queries > longest and not pads):
                continue
            whole = replace(batch, tokens=batch.requests * queries, uniform=True)
            if whole.tokens > max(FREE_TOKENS, 2 * batch.tokens):
                return None
            return self.key(whole, draws=False)
        return None

    @property
    def kinds(self) -> tuple[GraphKey, ...]:
        """The smallest graph of each kind: what differs in no more than the number of rows runs the same code."""
        smallest = {(key.queries, key.draws): key for key in self._all}  # which are in falling order
        return tuple(smallest.values())

    @property
    def most_tokens(self) -> int:
        """Of any graph."""
        return max((key.tokens for key in self._all), default=0)

    def captured(self, key: GraphKey) -> bool:
        """Whether that graph can be replayed."""
        return key in self._captured

    @property
    def missing(self) -> int:
        """Graphs that are still to be captured."""
        return len(self._waiting)

    def next_capture(self, wanted: GraphKey | None) -> GraphKey | None:
        """What to capture before this step, if anything: at most one graph between two steps.

        The largest batch first, whose memory serves all others; then what a step is waiting for; the others, largest
        first, while they serve.

        Args:
            wanted: the graph of the step that is about to run.
        """
        self._steps += 1
        if not self._waiting or self._steps <= EAGER_STEPS:
            return None
        if not self._captured:
            return self._waiting[0]
        if wanted is not None and wanted not in self._captured:
            return wanted
        return self._waiting[0] if self._steps % BETWEEN_CAPTURES == 0 else None

    def add(self, key: GraphKey) -> None:
        """That graph was captured."""
        self._waiting.remove(key)
        self._captured.add(key)

    def forget(self) -> None:
        """All graphs are gone, since the memory that they stood on is; they are captured again."""
        self._waiting = list(self._all)
        self._captured.clear()
