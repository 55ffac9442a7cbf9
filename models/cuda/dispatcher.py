"""Which graph computes a step, which one stands in for it, and which one is captured next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from troupellm.models.cuda.columns import CUT, DRAWN, GREEDY


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
    kind: int = GREEDY
    """The most that a row may need of `choose`: GREEDY, DRAWN or CUT."""

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


def useful_sizes(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Of batch sizes that somebody wants, those of up to `most` rows: one that is larger would be of padding alone."""
    return tuple(sorted({min(size, most) for size in sizes}))


class Dispatcher:
    """Knows which graphs there may be, and which there are.

    Every step has a graph soon: the largest ones are captured first, and until a step's own is there a larger one
    stands in for it, whose other rows pad. What steps ask for comes next, then all others, largest first. Graphs that
    draw, and those that draw from the likeliest tokens alone, are captured for batch sizes that did so: the others'
    logits can be drawn from.
    """

    def __init__(self, sizes: Iterable[int], *, queries: Iterable[int] = (1,), draws: bool = True) -> None:
        """
        Args:
            sizes: batch sizes to capture; none is to stay eager.
            queries: tokens per row of uniform steps.
            draws: whether graphs may draw tokens; else whoever looks at their logits does.
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
        self._possible = frozenset((*shapes, *drawing))
        self._captured: set[GraphKey] = set()
        self._stand_ins: dict[GraphKey, GraphKey | None] = {}
        self._waiting = self._by_size()
        self.given_up = 0
        """How many will never be captured."""

    def _by_size(self) -> list[GraphKey]:
        """The largest of each kind, then the others."""
        return [*self._largest, *(shape for shape in self._shapes if shape not in self._largest)]

    def key(self, batch: BatchDescriptor, kind: int = GREEDY) -> GraphKey | None:
        """The graph that is made for such a step, captured or not; None where it must be eager. kind: of the graph."""
        if not batch.uniform or batch.adapters or not batch.requests or batch.queries not in self._queries:
            return None
        size = next((size for size in self._sizes if size >= batch.requests), None)
        found = None if size is None else GraphKey(size, batch.queries, kind)
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
        """The smallest graph of each kind: what differs in no more than the number of rows runs the same code."""
        falling = sorted(self._possible, key=lambda key: (-key.tokens, key.queries, key.kind))
        return tuple({(key.queries, key.kind): key for key in falling}.values())

    @property
    def most_tokens(self) -> int:
        """Of any graph."""
        return max((key.tokens for key in self._shapes), default=0)

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    @property
    def missing(self) -> int:
        """How many are still to be captured."""
        return len(self._waiting)

    def stand_in(self, key: GraphKey) -> GraphKey | None:
        """What a step of that key is computed with now: the graph itself, or one whose rows pad, or one that takes the
        likeliest token where others are to be drawn from its logits, or draws from all where only some are left. None
        where there is none."""
        if key not in self._stand_ins:
            able = [
                one
                for one in self._captured
                if one.queries == key.queries and one.requests >= key.requests and one.kind <= key.kind
            ]
            self._stand_ins[key] = min(
                able, key=lambda one: (one.requests, one.kind != key.kind, one.kind), default=None
            )  # fmt: skip
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
        """What is captured next."""
        return self._waiting[0] if self._waiting else None

    def add(self, key: GraphKey) -> None:
        """That graph was captured."""
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
