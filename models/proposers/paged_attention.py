"""A drafter's own layers over the blocks of the model's rows."""

from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.paged_attention.tree import TreeMask
from troupellm.kernels.rope_kv_write.kv_write import host_kv_rows
from troupellm.models.batch.host_device import to_device
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.cache_layout import CacheLayout, cache_layout
from troupellm.models.layers.forward_batch import ForwardBatch, GroupBatch
from troupellm.models.proposers.paged_missing_kv import MissingKV

Ints = NDArray[np.int64]


def lying_in(target: CacheLayout) -> int:
    """The cache group of the model whose blocks a drafter's layers lie in: one that keeps all positions, if any."""
    widths = [float("inf") if window is None else float(window) for window in target.windows]
    return widths.index(max(widths))


def own_windows(config: DecoderConfig, target: CacheLayout) -> tuple[int | None, ...]:
    """Per layer of a drafter, its window: no more than the layer's blocks keep."""
    kept = target.windows[lying_in(target)]
    return tuple(
        kept if window is None or (kept is not None and kept < window) else window for window in config.windows
    )


class Paging:
    """Makes the batches of one drafter.

    Attributes:
        gaps: positions without entries.
    """

    def __init__(self, config: DecoderConfig, cache: KVCache, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        """config: of the drafter's layers; their windows are those of `own_windows`."""
        self._views = cache_layout(config).views
        self._group = lying_in(cache.layout)
        self.block_size = cache.block_size
        self.gaps = MissingKV(cache.block_size, whole=cache.layout.windows[self._group] is None)
        self.device = cache.storage.device
        plan = plan_attention(
            config,
            cache.block_size,
            dtype,
            device=self.device,
            kv_dtype=cache.storage.dtype,
            batch_invariant=batch_invariant,
        )
        self._plans = [plan.with_heads(*msgspec.structs.astuple(view.heads)) for view in self._views]

    def batch(
        self,
        blocks: NDArray[np.int32],
        slots: Ints,
        starts: Ints,
        counts: Ints,
        token_ids: Tensor,
        places: Ints,
        tree: TreeMask | None = None,
    ) -> ForwardBatch:
        """Consecutive entries of some rows, of each of which the last one comes out, or all of a tree.

        Args:
            blocks: int32 [groups, slots, width], the model's tables.
            slots, starts, counts: [rows].
            token_ids: int64 [sum of counts], on the device.
            places: int64 [sum of counts] within the row's blocks, if it lacks nothing: their positions, but for those
            of a tree.
            tree: the nodes that its nodes see.
        """
        ends = np.cumsum(counts)
        owner = np.arange(slots.size) if ends[-1] == slots.size else np.repeat(np.arange(slots.size), counts)
        positions, lying = places if tree is None else tree.positions, places
        if self.gaps.some:
            shift = self.gaps.shift(slots)
            starts, lying = starts - shift, places - shift[owner]
            if tree is not None:
                tree = replace(tree, bases=tree.bases - shift, positions=positions - shift[owner])
        columns = lying // self.block_size
        width = int(columns.max()) + 1
        if self.gaps.some:
            table = self.gaps.table(blocks[self._group], slots, width)
        else:
            table = blocks[self._group, slots, :width]
        blocks_of = table[owner, columns].astype(np.int64)
        within = lying - columns * self.block_size
        rows = {
            heads: to_device(host_kv_rows(blocks_of, within, heads, self.block_size), self.device)
            for heads in dict.fromkeys(view.heads.num_kv_heads for view in self._views)
        }
        return ForwardBatch(
            token_ids=token_ids.to(self.device),
            positions=to_device(positions, self.device),
            groups=tuple(
                GroupBatch(rows[view.heads.num_kv_heads], plan(table, starts, counts, view.window, tree))
                for view, plan in zip(self._views, self._plans, strict=True)
            ),
            logit_tokens=to_device(ends - 1 if tree is None else np.arange(places.size), self.device),
        )

    def blocks_at(self, blocks: NDArray[np.int32], slots: Ints, places: Ints) -> Ints:
        """The blocks [n] that hold some places [n] of rows [n]."""
        found: Ints = blocks[self._group, slots, places // self.block_size].astype(np.int64)
        return found


def positions_of(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... of each row, row after row."""
    if (counts == 1).all():
        return starts
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
