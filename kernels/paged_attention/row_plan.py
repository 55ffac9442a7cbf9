"""The attention plan of a step for back ends that gather each row's keys: row by row, on any device."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.kv_quant import as_bytes, decode
from troupellm.kernels.paged_attention.tree import TreeMask

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row's query tokens and keys."""

    tokens: slice
    """Place in the flat batch."""
    blocks: Tensor
    """int64 [blocks], from the one with the first key that any token sees."""
    keys: slice
    """Within the gathered blocks."""
    seen: Tensor
    """bool [tokens, keys]."""

    def gather(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """The row's keys or values [kv_heads, keys, head_dim], as numbers of `dtype`."""
        picked = as_bytes(cache).index_select(0, self.blocks).view(cache.dtype).transpose(0, 1)
        return decode(picked, dtype).flatten(1, 2)[:, self.keys]


class RowPlan:
    """Query tokens and their keys, row by row.

    Attributes:
        num_tokens: query tokens of all rows.
        rows: those with query tokens.
    """

    def __init__(
        self,
        block_tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        *,
        block_size: int,
        window: int | None = None,
        device: torch.device,
        tree: TreeMask | None = None,
    ) -> None:
        """Arguments as of `plan.AttentionPlan`; the tensors lie on `device`."""
        self._tables, self._block_size, self._window, self._device = block_tables, block_size, window, device
        self.tree = tree
        self._starts, self._counts, self._stops = starts, counts, np.cumsum(counts)
        self.num_tokens = int(self._stops[-1]) if counts.size else 0

    @cached_property
    def rows(self) -> tuple[RowSpan, ...]:
        return tuple(self._row(row) for row in np.flatnonzero(self._counts).tolist())

    @cached_property
    def tables(self) -> Tensor:
        """int32 [rows, width]."""
        return torch.from_numpy(np.ascontiguousarray(self._tables)).to(self._device)

    @cached_property
    def items(self) -> Tensor:
        """int32 [tokens, 4] on the CPU: token, row, first key position, key position past the last."""
        rows = np.repeat(np.arange(self._counts.size), self._counts)
        tokens = np.arange(self.num_tokens)
        last = self._starts[rows] + tokens - (self._stops - self._counts)[rows] + 1
        behind = last if self.tree is None else self.tree.positions + 1
        first = np.zeros_like(last) if self._window is None else np.maximum(0, behind - self._window)
        return torch.from_numpy(np.stack((tokens, rows, first, last), axis=1).astype(np.int32))

    def _row(self, row: int) -> RowSpan:
        start, count, size = int(self._starts[row]), int(self._counts[row]), self._block_size
        end = start + count
        begin = 0 if self._window is None else max(0, start + 1 - self._window)
        first = begin // size
        blocks = torch.from_numpy(self._tables[row, first : -(-end // size)].astype(np.int64))
        tokens = slice(int(self._stops[row]) - count, int(self._stops[row]))
        queries = torch.arange(start, end, device=self._device)[:, None]
        keys = torch.arange(begin, end, device=self._device)
        seen = keys <= queries
        if self.tree is not None:
            places = np.arange(begin, end)
            mask = np.stack([self.tree.visible(row, token, places) for token in range(tokens.start, tokens.stop)])
            seen &= torch.from_numpy(mask).to(self._device)
            queries = torch.from_numpy(self.tree.positions[tokens]).to(self._device)[:, None]
        if self._window is not None:
            seen &= keys > queries - self._window
        return RowSpan(
            tokens=tokens,
            blocks=blocks.to(self._device),
            keys=slice(begin - first * size, end - first * size),
            seen=seen,
        )
