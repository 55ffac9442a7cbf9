"""What the rows of a step attend to: worked out once per step on the host, read by every layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PREFILL_TOKENS = 16
"""A row with at least so many query tokens is computed as one dense product, below that token by token."""
BUCKET_SLACK = 1.25
"""How much longer than its shortest member the longest of a bucket may be."""

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


class AttentionPlan:
    """Query tokens and their keys.

    Attributes:
        block_tables: int32 [rows, width].
        items: int32 [items, 4]: token, row, first key position, key position past the last.
        num_tokens: query tokens of all rows.
        prefills: the rows with many query tokens; their tokens are in no item.
    """

    def __init__(
        self, block_tables: NDArray[np.int32], starts: Ints, counts: Ints, *, block_size: int, num_kv_heads: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        """Plan one step.

        Args:
            block_tables: [rows, width] block ids; entries behind a row's keys are never read.
            starts: [rows] position of each row's first query token.
            counts: [rows] query tokens of each row; they follow each other in the flat batch.
            window: how many keys a token sees, itself included; None sees all before it.
        """
        self._block_size, self._num_kv_heads, self._window = block_size, num_kv_heads, window
        self._tables = np.ascontiguousarray(block_tables)
        self.block_tables = torch.from_numpy(self._tables)
        ends = np.cumsum(counts)
        self.num_tokens = int(ends[-1])
        dense = counts >= PREFILL_TOKENS
        self.prefills = tuple(
            self._prefill(row, slice(int(ends[row] - counts[row]), int(ends[row])), int(starts[row]))
            for row in np.flatnonzero(dense).tolist()
        )
        single = np.flatnonzero(~dense)
        rows = np.repeat(single, counts[single])
        place = np.arange(rows.size) - np.repeat(np.cumsum(counts[single]) - counts[single], counts[single])
        last = starts[rows] + place + 1
        first = np.zeros_like(last) if window is None else np.maximum(0, last - window)
        tokens = ends[rows] - counts[rows] + place
        self._items = np.stack((tokens, rows, first, last), axis=1).astype(np.int32)
        self.items = torch.from_numpy(self._items)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The items, sorted by length into groups that can be gathered and padded together."""
        size = self._block_size
        first = self._items[:, 2] // size
        blocks = -(-self._items[:, 3] // size) - first
        order = np.argsort(blocks, kind="stable")
        groups: list[list[int]] = []
        for item in order.tolist():
            if not groups or blocks[item] > max(BUCKET_SLACK * blocks[groups[-1][0]], blocks[groups[-1][0]] + 1):
                groups.append([])
            groups[-1].append(item)
        return tuple(self._bucket(np.asarray(group), first, blocks) for group in groups)

    def _bucket(self, group: Ints, first: NDArray[np.int32], blocks: NDArray[np.int32]) -> Bucket:
        width = int(blocks[group].max())
        columns = np.minimum(first[group, None] + np.arange(width), first[group, None] + blocks[group, None] - 1)
        table = self._tables[self._items[group, 1, None], columns]
        positions = first[group, None] * self._block_size + np.arange(width * self._block_size)
        seen = (positions >= self._items[group, 2, None]) & (positions < self._items[group, 3, None])
        return Bucket(
            tokens=torch.from_numpy(self._items[group, 0].astype(np.int64)),
            gather=self._gather(table),
            hidden=torch.from_numpy(~seen)[:, None, :, None],
        )

    def _prefill(self, row: int, tokens: slice, start: int) -> PrefillSpan:
        count, size = tokens.stop - tokens.start, self._block_size
        end = start + count
        begin = 0 if self._window is None else max(0, start + 1 - self._window)
        first = begin // size
        mask = None
        if start > 0 or (self._window is not None and self._window < end):
            queries, keys = torch.arange(start, end)[:, None], torch.arange(begin, end)
            mask = keys <= queries
            if self._window is not None:
                mask &= keys > queries - self._window
        return PrefillSpan(
            tokens=tokens,
            gather=self._gather(self._tables[row : row + 1, first : -(-end // size)]),
            keys=slice(begin - first * size, end - first * size),
            mask=mask,
        )

    def _gather(self, table: NDArray[np.int32]) -> Tensor:
        """Cache rows [items * kv_heads * blocks] of a table [items, blocks]."""
        heads = np.arange(self._num_kv_heads)
        rows = table.astype(np.int64)[:, None, :] * self._num_kv_heads + heads[:, None]
        return torch.from_numpy(rows.reshape(-1))
