"""Marks of blocks whose positions have a drafter's entries.

Entries are shared together with their block, and yet some blocks lack them: those of rows that the drafter did not
follow while drafts did not pay. A drafter also does not know when a block is reused, and a block may come from an outer
tier. So a block whose entries are made gets a mark beside them: a few bytes of the model's keys in the block. If the
keys differ later, the block was written to since, and its entries belong to an earlier text.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.kv_quant import as_bytes
from troupellm.models.batch.host_device import to_device, to_host
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.memory.drafter_needs import MARK_NUMBERS
from troupellm.models.proposers.paged_attention import Ints, Paging, lying_in, positions_of

MOST_READ = 2048
"""Tokens that are read again of blocks without entries, by all rows together that a step brings: it waits for that."""
_BYTES = 4
"""Bytes taken of the key at either end of a block, the last ones: keys with few bits have their scale there."""


class DrafterBlocks:
    """Marks of the blocks that contain a drafter's layers, which are kept as long as their rows exist."""

    def __init__(self, cache: KVCache, paging: Paging) -> None:
        """cache: its borders end with the marks."""
        layout, group = cache.layout, lying_in(cache.layout)
        deepest = max(layer for layer, view in enumerate(layout.view_of) if layout.views[view].group == group)
        assert cache.borders is not None
        self._kept = cache.borders[:, -MARK_NUMBERS:]
        stride = layout.views[layout.view_of[deepest]].stride
        self._keys = as_bytes(cache.layers[deepest][0][::stride, 0])
        self._ends = torch.tensor((0, cache.block_size - 1), device=cache.storage.device)
        self._paging = paging

    def put(self, blocks: NDArray[np.int32], slots: Ints, starts: Ints, ends: Ints) -> None:
        """The blocks of rows [rows] that became full between those positions have their entries.

        Args:
            blocks: int32 [groups, slots, width], the model's tables.
        """
        size = self._paging.block_size
        first, counts = starts // size, np.maximum(ends // size - starts // size, 0)
        if counts.any():
            places = positions_of(first, counts) * size
            there = to_device(self._paging.blocks_at(blocks, np.repeat(slots, counts), places), self._ends.device)
            self._kept[there] = self._now(there)

    def runs(self, blocks: NDArray[np.int32], slots: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Of the first `counts` blocks of rows [rows]: how many have their entries up to the first one that has not,
        and from which one on all have. Waits for the device, if there are any."""
        lead, trail = counts.copy(), np.zeros_like(counts)
        if not counts.any():
            return lead, trail
        owner, index = np.repeat(np.arange(slots.size), counts), positions_of(np.zeros_like(counts), counts)
        found = self._paging.blocks_at(blocks, slots[owner], index * self._paging.block_size)
        there = to_device(found, self._ends.device)
        same = (self._kept[there].view(torch.int32) == self._now(there).view(torch.int32)).all(dim=1)
        bare = np.flatnonzero(~to_host(same))
        np.minimum.at(lead, owner[bare], index[bare])
        np.maximum.at(trail, owner[bare], index[bare] + 1)
        return lead, trail

    def _now(self, blocks: Tensor) -> Tensor:
        """The marks that the current keys of blocks [n] would give; float32 [n, numbers], to be compared as bits."""
        keys = self._keys[blocks[:, None], self._ends].view(torch.uint8)
        return keys[..., -_BYTES:].contiguous().view(torch.float32).flatten(1)


def reread(lead: Ints, trail: Ints, whole: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Where rows [rows] with shared blocks continue if blocks without entries can be read again; all in blocks.

    Args:
        lead, trail: as of `DrafterBlocks.runs`, of their first `whole` ones.

    Returns:
        from where each reads, and up to where it passes over what lies behind `lead`: `lead` itself if over nothing.
    """
    rows = max(int(np.count_nonzero(lead < whole)), 1)
    near = whole - MOST_READ // (block_size * rows)
    far = lead < near
    return np.where(far, np.where(trail > near, near, whole), lead), np.where(far, np.minimum(trail, near), lead)
