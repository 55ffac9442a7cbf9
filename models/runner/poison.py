"""A debug allocator: fills unwritten memory with values that show up in results.

NaN spreads through every computation that reads it; bytes of 0x7f read as huge numbers that are no NaN. Answers must
not change with either pattern.
"""

from typing import Literal

import torch

from troupellm.kernels.kv_quant import FP8, as_bytes
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import RowTable
from troupellm.models.batch.spans import Spans
from troupellm.models.kv_offload.transfers import TransferEngine
from troupellm.protocol.messages.worker import StepPlan

Pattern = Literal["nan", "0x7f"]
_NONSENSE_TOKEN = 0x7F7F7F7F
_HUGE_STATE = 6e4
"""The largest that every type of a state holds, nearly."""


class Poison:
    """Follows the plans of one worker.

    The positions that a row is about to compute, and all later ones in its blocks, are poisoned first. So the row never
    reads content of the blocks' previous rows. Without a prefix cache, a block that no row holds is free and is
    poisoned at once. A block that is loaded from another tier is poisoned before the load. A row's state is poisoned
    where no copy has begun it.
    """

    def __init__(
        self, cache: KVCache, pattern: Pattern, *, when_freed: bool, transfers: TransferEngine | None = None
    ) -> None:
        """
        Args:
            when_freed: a block that no row holds is free.
            transfers: the engine that also reads and writes blocks.
        """
        self._block_size = cache.block_size
        self._storages = [as_bytes(storage) for storage in cache.model_storages]
        self._groups = [
            [(as_bytes(part), stride) for part, stride in cache.of_group(group)]
            for group in range(len(cache.layout.windows))
        ]
        self._when_freed, self._transfers = when_freed, transfers
        self._held: set[int] = set()
        self._value = _value(pattern, cache.storage.dtype)
        for storage in self._storages:
            storage.fill_(self._value)
        self._states, self._begun = cache.states, set[int]()
        """State slots that a copy has begun, and no row has been given yet."""
        self._state_value = float("nan") if pattern == "nan" else _HUGE_STATE
        if self._states is not None:
            self._states.fill(slice(None), self._state_value)

    def follow(self, plan: StepPlan, rows: RowTable, spans: Spans) -> None:
        """Poison after a plan's rows, copies and transfers were taken in, before any of it is computed.

        Args:
            spans: the positions that are about to be computed.
        """
        loading: set[int] = set()
        if self._transfers is not None:
            self._transfers.settle()  # so that stores under way read the content from before
            loading = self._transfers.loading()
        for index, start in zip(spans.rows.tolist(), spans.starts.tolist(), strict=True):
            row = plan.rows[index]
            for group, table in enumerate(rows.tables(row)):
                self._from(group, table, start // self._block_size, start % self._block_size)
        if self._when_freed:
            held = rows.held_blocks()
            for block in self._held - held - loading:
                self._fill(block)
            self._held = held
        rows.poison_free_slots(_NONSENSE_TOKEN)
        if self._states is not None:
            self._begun |= {copy.target for copy in plan.states}
            slots = {new.state for new in plan.new_rows}
            self._states.fill(sorted(slots - self._begun), self._state_value)
            self._begun -= slots

    def before_loads(self, blocks: set[int]) -> None:
        """Poison blocks that no row holds, so that a load that fails or is incomplete shows in the answers."""
        for block in blocks:
            self._fill(block)
        if self._storages[0].is_cuda:  # loads are not ordered after the kernels that are launched here
            torch.cuda.current_stream(self._storages[0].device).synchronize()

    def _from(self, group: int, table: list[int], index: int, place: int) -> None:
        """Positions from `place` of the table's block `index` on."""
        if place and index < len(table):
            for part, stride in self._groups[group]:
                part[table[index] * stride, :, place:] = self._value
            index += 1
        for block in table[index:]:
            self._fill(block)

    def _fill(self, block: int) -> None:
        for storage in self._storages:
            storage[:, :, block] = self._value


def _value(pattern: Pattern, dtype: torch.dtype) -> float:
    if dtype == torch.int8:  # where bytes of 0xff make a scale that is not a number
        return -1 if pattern == "nan" else 0x7F
    if dtype == FP8:  # where 0x7f is not a number
        return 0x7F
    if pattern == "nan":
        return float("nan")
    return float(torch.full((dtype.itemsize,), 0x7F, dtype=torch.uint8).view(dtype))
