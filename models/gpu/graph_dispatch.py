"""Decides which graph computes a step, which larger graph can replace it, and which graph is captured next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from troupellm.models.gpu.sampling_tensors import CUT, DRAWN, GREEDY


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The properties of a step that select its graph."""

    tokens: int
    requests: int
    uniform: bool
    """All rows have the same number of tokens."""
    adapters: bool = False
    """At least one row computes with an adapter."""

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
    kind: int = GREEDY
    """The most that a row may need of `choose`: GREEDY, DRAWN or CUT."""
    adapters: bool = False
    """Rows may have adapters."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.requests * self.queries


VERIFIED_TOKENS = 256
"""Most tokens of a graph that verifies drafts: its logits are kept, and larger batches draft little."""
FREE_TOKENS = 64
"""Rows may be padded up to this number: a small step is bound by reading the weights, so they cost hardly more."""


def default_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own, for up to `most` rows: small ones closely, large ones in steps of 16."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    return tuple(size for size in sizes if size < most) + tuple(size for size in sizes if size >= most)[:1]


def useful_sizes(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Limit the configured batch sizes to `most` rows: a larger graph would only add padding."""
    return tuple(sorted({min(size, most) for size in sizes}))


class Dispatcher:
    """Keeps the lists of graphs to capture and of captured ones.

    Every step soon has a graph: the largest ones are captured first. Until a step's own graph exists, a larger one
    computes it, with padding in the other rows. Graphs that steps ask for are captured next, then all others, largest
    first. Graphs that draw, and those that draw from the likeliest tokens alone, are captured only for batch sizes that
    did so; for other sizes, tokens are drawn from the logits of a graph. Graphs with adapters are captured only for
    batch sizes that had some."""

    def __init__(
        self, sizes: Iterable[int], *, queries: Iterable[int] = (1,), draws: bool = True, adapters: bool = False
    ) -> None:
        """
        Args:
            sizes: batch sizes to capture; an empty list means eager steps only.
            queries: tokens per row of uniform steps.
            draws: graphs may draw tokens; otherwise the caller draws from their logits.
            adapters: steps with adapters may have graphs.
        """
        self._sizes = tuple(sorted(set(sizes)))
        self._queries = tuple(sorted(set(queries)))
        shapes = [
            GraphKey(size, count)
            for count in self._queries
            for size in reversed(self._sizes)
            if count == 1 or size * count <= VERIFIED_TOKENS
        ]
        self._shapes = tuple(sorted(shapes, key=lambda shape: -shape.tokens))
        largest = {shape.queries: shape for shape in reversed(self._shapes)}
        self._largest = tuple(shape for shape in self._shapes if largest[shape.queries] == shape)
        kinds = (DRAWN, CUT) if draws else ()
        drawing = [replace(shape, kind=kind) for shape in shapes if shape.queries == 1 for kind in kinds]
        adapted = [replace(key, adapters=True) for key in (*shapes, *drawing)] if adapters else []
        self._possible = frozenset((*shapes, *drawing, *adapted))
        self._captured: set[GraphKey] = set()
        self._stand_ins: dict[GraphKey, GraphKey | None] = {}
        self._waiting = self._by_size()
        self.given_up = 0
        """Number of graphs that will never be captured."""

    def _by_size(self) -> list[GraphKey]:
        """The largest of each kind, then the others."""
        return [*self._largest, *(shape for shape in self._shapes if shape not in self._largest)]

    def key(self, batch: BatchDescriptor, kind: int = GREEDY) -> GraphKey | None:
        """The graph that is made for such a step, captured or not; None where it must be eager. kind: of the graph."""
        if not batch.uniform or not batch.requests or batch.queries not in self._queries:
            return None
        size = next((size for size in self._sizes if size >= batch.requests), None)
        found = None if size is None else GraphKey(size, batch.queries, kind, batch.adapters)
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
            return self.key(whole)
        return None

    @property
    def kinds(self) -> tuple[GraphKey, ...]:
        """The smallest graph of each kind: graphs that differ only in the number of rows run the same code."""
        falling = sorted(self._possible, key=lambda key: (-key.tokens, key.queries, key.kind, key.adapters))
        return tuple({(key.queries, key.kind, key.adapters): key for key in falling}.values())

    @property
    def most_tokens(self) -> int:
        """Most tokens of any graph."""
        return max((key.tokens for key in self._shapes), default=0)

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return len(self._captured)

    @property
    def missing(self) -> int:
        """Number of graphs that are still to be captured."""
        return len(self._waiting)

    def stand_in(self, key: GraphKey) -> GraphKey | None:
        """The captured graph that computes a step of that key now; None if there is none. It is the graph itself, or
        one with padded rows. It may also take the likeliest token, or draw from all tokens, where the step draws
        from fewer; the tokens are then drawn from its logits."""
        if key not in self._stand_ins:
            able = [
                one
                for one in self._captured
                if (one.queries, one.adapters) == (key.queries, key.adapters)
                and one.requests >= key.requests
                and one.kind <= key.kind
            ]
            self._stand_ins[key] = min(
                able, key=lambda one: (one.requests, one.kind != key.kind, one.kind), default=None
            )
        return self._stand_ins[key]

    def want(self, key: GraphKey) -> None:
        """A step is made for that graph, which is captured next, if it is not there: behind the largest ones."""
        if key in self._captured or key in self._largest or self.given_up:
            return
        place = sum(one in self._largest for one in self._waiting[: len(self._largest)])
        if place == len(self._waiting) or self._waiting[place] != key:
            self._waiting = [one for one in self._waiting if one != key]
            self._waiting.insert(place, key)

    def next_capture(self) -> GraphKey | None:
        """The graph to capture next; None if none is left."""
        return self._waiting[0] if self._waiting else None

    def add(self, key: GraphKey) -> None:
        """Note that the graph was captured."""
        self._waiting.remove(key)
        self._captured.add(key)
        self._stand_ins.clear()

    def give_up(self) -> None:
        """Capture nothing more: steps are computed with the graphs that there are, or without one."""
        self.given_up, self._waiting = len(self._waiting), []

    def forget(self) -> None:
        """All graphs are gone, since the memory that they stood on is; they are captured again, if any are."""
        self._waiting = [] if self.given_up else self._by_size()
        self._captured.clear()
        self._stand_ins.clear()
