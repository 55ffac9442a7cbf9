"""A debug allocator: memory that nothing was written to holds what nobody can overlook.

With NaN, whoever reads it spreads it; with bytes of 0x7f, who reads it gets huge numbers that are no NaN. Answers must
not change under either.
"""

from typing import Literal

import torch

from troupellm.models.kv_cache import KVCache
from troupellm.models.row_table import RowTable
from troupellm.protocol.worker import StepPlan

Pattern = Literal["nan", "0x7f"]
_NONSENSE_TOKEN = 0x7F7F7F7F


class Poison:
    """Follows the plans of one worker.

    Positions that a row is given are poisoned when it is given them, however the block was used before, since only the
    scheduler knows when it was freed. Without a prefix cache a block that no row holds is free, and is poisoned then.
    """

    def __init__(self, cache: KVCache, pattern: Pattern, *, when_freed: bool) -> None:
        self._storage = cache.storage
        self._block_size = cache.block_size
        self._when_freed = when_freed
        self._tables: dict[int, list[int]] = {}
        self._value = _value(pattern, cache.storage.dtype)
        self._storage.fill_(self._value)
        self.num_poisoned = 0
        """Positions, for tests."""

    def follow(self, plan: StepPlan, rows: RowTable) -> None:
        """After a plan's rows and copies were taken in, before anything of it is computed."""
        before = {block for table in self._tables.values() for block in table} if self._when_freed else set()
        for row in plan.retired:
            self._tables.pop(row, None)
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        for new in plan.new_rows:
            table = self._tables[new.row] = list(new.blocks[0])
            start = starts.get(new.row, 0)
            self._from(table, start // self._block_size, start % self._block_size)
        for change in plan.changes:
            if change.appended_blocks:
                table = self._tables[change.row]
                first = len(table)
                table += change.appended_blocks[0]
                self._from(table, first, 0)
        if self._when_freed:
            for block in before.difference(*self._tables.values()):
                self._fill(block, 0)
        rows.poison_free_slots(_NONSENSE_TOKEN)

    def _from(self, table: list[int], index: int, place: int) -> None:
        """Positions from `place` of the table's block `index` on."""
        for block in table[index:]:
            self._fill(block, place)
            place = 0

    def _fill(self, block: int, place: int) -> None:
        self._storage[:, :, block, :, place:] = self._value
        self.num_poisoned += self._block_size - place


def _value(pattern: Pattern, dtype: torch.dtype) -> float:
    if pattern == "nan":
        return float("nan")
    return float(torch.full((dtype.itemsize,), 0x7F, dtype=torch.uint8).view(dtype))
