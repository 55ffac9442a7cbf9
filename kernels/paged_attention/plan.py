"""The attention plan of a step: computed once per step on the host, read by every layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask

PREFILL_TOKENS = 16
"""A row with at least this many query tokens is computed as one dense product, a shorter one token by token."""
JOB_QUERIES = 256
"""Query tokens times heads of a KV head's group that compiled code takes together: as many as its caches hold."""
JOB_HEADS = 8
"""Queries that compiled code takes together of a row with fewer than PREFILL_TOKENS (kMostHeads of attend.h): larger
groups than half of it would have one token in each call."""
BUCKET_MARGIN = 1.25
"""Largest ratio of the longest to the shortest member of a bucket."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Many consecutive query tokens of one row."""

    tokens: slice
    gather: Tensor
    """int64 [kv_heads * blocks]: rows of a cache seen as [blocks * kv_heads, block_size, head_dim]."""
    keys: slice
    """Within the gathered blocks, the keys that any of the tokens sees."""
    mask: Tensor | None
    """bool [tokens, keys], True where a token sees a key; None is plain causal from the first key on."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Single query tokens whose contexts are about equally long."""

    tokens: Tensor
    """int64 [items]."""
    gather: Tensor
    """int64 [items * kv_heads * blocks], as in `PrefillSpan`."""
    hidden: Tensor
    """bool [items, 1, keys, 1]: True where a gathered key is not to be seen."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A plan in two parts."""

    spans: tuple[PrefillSpan, ...]
    """Rows with many query tokens."""
    rest: "AttentionPlan | None"
    """All other rows; None where there is none."""
    tokens: Tensor
    """int64, where the tokens of the rest lie in the flat batch."""


class AttentionPlan:
    """Query tokens and their keys. Parts that only one path needs are computed on first use.

    Attributes:
        block_tables: int32 [rows, width].
        num_tokens: query tokens of all rows.
        block_size, window: as given; window 0 is none.
    """

    def __init__(
        self,
        block_tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        *,
        block_size: int,
        num_kv_heads: int,
        window: int | None = None,
        by_token: bool = False,
        compiled: bool = True,
        tree: TreeMask | None = None,
    ) -> None:
        """Plan one step.

        Args:
            block_tables: [rows, width] block ids; entries behind a row's keys are never read.
            starts: [rows] position of each row's first query token.
            counts: [rows] query tokens of each row; they follow each other in the flat batch.
            window: the number of keys that a token sees, itself included; None sees all before it.
            by_token: every token is computed as if it were the only one, so that its result is the same, to the bit, in
                any batch.
            compiled: the compiled path may be taken, if there is one.
            tree: of rows whose last tokens are trees of drafts, for this window; `starts` are places in the cache.
        """
        self.block_size, self.window, self.by_token = block_size, window or 0, by_token
        self.compiled = compiled
        self._num_kv_heads, self._starts, self._counts = num_kv_heads, starts, counts
        self._tables = np.ascontiguousarray(block_tables)
        self.cpp_plans: dict[int, object] = {}
        """The plan in the form of compiled code, see `cpu.cpp_plan`."""
        self._apart: dict[int, Apart | None] = {}
        self._ends = np.cumsum(counts)
        self.num_tokens = int(self._ends[-1])
        self._dense = np.zeros_like(counts, dtype=bool) if by_token else counts >= PREFILL_TOKENS
        self.tree = tree
        if tree is not None:
            self._dense &= tree.bases == NO_TREE

    @cached_property
    def block_tables(self) -> Tensor:
        return torch.from_numpy(self._tables)

    def apart(self, least: int) -> "Apart | None":
        """Separates rows with many query tokens from the others, once; None if there is no such row.

        Args:
            least: query tokens, more than are computed one by one.
        """
        if least not in self._apart:
            self._apart[least] = self._set_apart(np.flatnonzero(self._dense & (self._counts >= least)))
        return self._apart[least]

    def _set_apart(self, long: Ints) -> "Apart | None":
        if not long.size:
            return None
        others = np.delete(np.arange(self._counts.size), long)
        owner = np.repeat(np.arange(self._counts.size), self._counts)
        tokens = np.flatnonzero(~np.isin(owner, long))
        rest = None
        if others.size:
            tree = None if self.tree is None else self.tree.of(others, tokens)
            rest = AttentionPlan(
                self._tables[others],
                self._starts[others],
                self._counts[others],
                block_size=self.block_size,
                num_kv_heads=self._num_kv_heads,
                window=self.window or None,
                compiled=self.compiled,
                tree=tree,
            )
        return Apart(tuple(self._span(row) for row in long.tolist()), rest, torch.from_numpy(tokens))

    @cached_property
    def alone(self) -> bool:
        """True if every row has one query token, so that none reads keys that another one writes."""
        return self.num_tokens == len(self._counts)

    def jobs(self, group: int) -> NDArray[np.int32]:
        """For compiled code, with `group` query heads per KV head: [jobs, 4] of first token, tokens, row, and position
        of the first token. Long jobs come first, so that no thread has one left at the end."""
        if self.alone:
            alone = np.ones((self.num_tokens, 4), dtype=np.int32)
            alone[:, 0] = alone[:, 2] = np.arange(self.num_tokens)
            alone[:, 3] = self._starts
            return alone
        most = max(PREFILL_TOKENS, JOB_QUERIES // group)
        step = np.where(self._dense, most, self._together(group))
        parts = -(-self._counts // step)
        row = np.repeat(np.arange(parts.size), parts)
        part = np.arange(row.size) - np.repeat(np.cumsum(parts) - parts, parts)
        count, number = self._counts[row], parts[row]
        first, last = count * part // number, count * (part + 1) // number
        token, position = self._ends[row] - count + first, self._starts[row] + first
        found = np.stack((token, last - first, row, position), axis=1).astype(np.int32)
        work = (last - first) * (position + last - first)
        return np.ascontiguousarray(found[np.argsort(-work, kind="stable")])

    def _together(self, group: int) -> int:
        """How many tokens of a row of few are one job: all where they share what is read, and no job is so long that
        other threads would wait for it."""
        few = ~self._dense
        if self.by_token or self.window or self.tree is not None or group > JOB_HEADS // 2 or not few.any():
            return 1
        work = self._counts * (self._starts + self._counts)
        enough = int(work.sum()) * self._num_kv_heads >= 2 * torch.get_num_threads() * int(work[few].max())
        return PREFILL_TOKENS if enough else 1

    def tree_jobs(self, jobs: NDArray[np.int32]) -> NDArray[np.int64]:
        """Beside `jobs`, [jobs, 3] of jobs of one token: the first key, where the row's tree begins, and which of its
        nodes are seen, as bits."""
        assert self.tree is not None
        token, row, position = jobs[:, 0], jobs[:, 2], self.tree.positions[jobs[:, 0]]
        first = np.maximum(0, position + 1 - self.window) if self.window else np.zeros_like(position)
        base = np.minimum(self.tree.bases[row], jobs[:, 3] + 1)
        return np.ascontiguousarray(np.stack((first, base, self.tree.seen[token].view(np.int64)), axis=1))

    @cached_property
    def prefills(self) -> tuple[PrefillSpan, ...]:
        """The rows with many query tokens; their tokens are in no item."""
        return tuple(self._span(row) for row in np.flatnonzero(self._dense).tolist())

    @cached_property
    def items(self) -> Tensor:
        """int32 [items, 4]: token, row, first key position, key position past the last."""
        return torch.from_numpy(self._items)

    @cached_property
    def _items(self) -> NDArray[np.int32]:
        single = np.flatnonzero(~self._dense)
        counts = self._counts[single]
        rows = np.repeat(single, counts)
        place = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
        last = self._starts[rows] + place + 1
        tokens = self._ends[rows] - self._counts[rows] + place
        behind = last if self.tree is None else self.tree.positions[tokens] + 1
        first = np.maximum(0, behind - self.window) if self.window else np.zeros_like(last)
        return np.stack((tokens, rows, first, last), axis=1).astype(np.int32)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The items, sorted by length into groups that can be gathered and padded together."""
        size = self.block_size
        first = self._items[:, 2] // size
        blocks = -(-self._items[:, 3] // size) - first
        order = np.argsort(blocks, kind="stable")
        groups: list[list[int]] = []
        for item in order.tolist():
            if not groups or blocks[item] > max(BUCKET_MARGIN * blocks[groups[-1][0]], blocks[groups[-1][0]] + 1):
                groups.append([])
            groups[-1].append(item)
        return tuple(self._bucket(np.asarray(group), first, blocks) for group in groups)

    def _bucket(self, group: Ints, first: NDArray[np.int32], blocks: NDArray[np.int32]) -> Bucket:
        width = int(blocks[group].max())
        columns = np.minimum(first[group, None] + np.arange(width), first[group, None] + blocks[group, None] - 1)
        table = self._tables[self._items[group, 1, None], columns]
        positions = first[group, None] * self.block_size + np.arange(width * self.block_size)
        seen = (positions >= self._items[group, 2, None]) & (positions < self._items[group, 3, None])
        if self.tree is not None:
            for place, (token, row) in enumerate(self._items[group, :2].tolist()):
                seen[place] &= self.tree.visible(row, token, positions[place])
        return Bucket(
            tokens=torch.from_numpy(self._items[group, 0].astype(np.int64)),
            gather=self._gather(table),
            hidden=torch.from_numpy(~seen)[:, None, :, None],
        )

    def _span(self, row: int) -> PrefillSpan:
        start, count, stop = int(self._starts[row]), int(self._counts[row]), int(self._ends[row])
        end, size = start + count, self.block_size
        begin = max(0, start + 1 - self.window) if self.window else 0
        first = begin // size
        mask = None
        if start > 0 or (0 < self.window < end):
            queries, keys = torch.arange(start, end)[:, None], torch.arange(begin, end)
            mask = keys <= queries
            if self.window:
                mask &= keys > queries - self.window
        return PrefillSpan(
            tokens=slice(stop - count, stop),
            gather=self._gather(self._tables[row : row + 1, first : -(-end // size)]),
            keys=slice(begin - first * size, end - first * size),
            mask=mask,
        )

    def _gather(self, table: NDArray[np.int32]) -> Tensor:
        """Cache rows [items * kv_heads * blocks] of a table [items, blocks]."""
        heads = np.arange(self._num_kv_heads)
        rows = table.astype(np.int64)[:, None, :] * self._num_kv_heads + heads[:, None]
        return torch.from_numpy(rows.reshape(-1))
