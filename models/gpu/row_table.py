"""The worker's knowledge of each row between steps, with tokens and block tables on the device.

Numbers that follow from the plans stay on the host. A plan's changes are sent along with the next step. A step writes
its own sampled tokens, so that the next one runs before the host has seen them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.models.gpu.device import Device
from troupellm.models.gpu.host_transfer import Ints, Staging
from troupellm.protocol.messages.worker import NULL_BLOCK

Ints32 = NDArray[np.int32]


class DeviceRows(RowTable):
    """Rows by slot; behind the slots lies one more, which rows that pad a batch write to.

    Attributes:
        tokens: int32 [slots + 1, max_model_len + 1] on the device.
        block_tables: int32 [groups, slots + 1, blocks per row] on the device; the null page where a row has none.
        generation: rises when both are replaced by larger ones.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: Device,
        staging: Staging,
        slots: int,
        null_page: int,
    ) -> None:
        """
        Args:
            slots: to begin with.
            null_page: a block that no row has.
        """
        super().__init__(max_model_len=max_model_len, block_size=block_size, num_groups=num_groups, slots=slots)
        self._device, self._staging, self._null = device, staging, null_page
        self._tables_changed: list[tuple[int, int, int, int]] = []
        self._tokens_known: list[tuple[int, int, NDArray[np.int32]]] = []
        self.generation = 0
        self.block_tables = torch.empty(0, dtype=torch.int32)
        self._grow()

    @property
    def scratch(self) -> int:
        """The slot behind all others."""
        return self.tokens.shape[0] - 1

    def append_blocks(self, row: int, groups: Sequence[Sequence[int]]) -> None:
        """As `RowTable.append_blocks`."""
        if not groups:
            return
        for blocks in groups:
            if blocks and not NULL_BLOCK <= min(blocks) <= max(blocks) < self._null:
                raise PlanError(f"row {row}: block {max(blocks)} of {self._null} was named")
        slot = self.slot(row)
        begins = self.num_blocks[:, slot].tolist()
        super().append_blocks(row, groups)
        for group, (begin, end) in enumerate(zip(begins, self.num_blocks[:, slot].tolist(), strict=True)):
            if end > begin:
                self._tables_changed.append((group, slot, begin, end))

    def append(self, slots: Ints, tokens: Tensor) -> None:
        """As `RowTable.append`, with tokens on the device."""
        (places,) = self._staging.send(slots * self.tokens.shape[1] + self.lengths[slots])
        self.tokens.view(-1).index_copy_(0, places, tokens.clamp(min=0).to(torch.int32))
        self.lengths[slots] += 1

    def put(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """As `RowTable.put`; every later read of the device's tokens sees them."""
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            self._write(slot, position, np.array([token], dtype=np.int32))
        self._flush()

    def settle(self) -> None:
        """As `RowTable.settle`."""
        if self._tokens_known:
            self._flush()

    def text(self, slot: int) -> Ints32:
        """As `RowTable.text`; waits for the device."""
        self._flush()
        found: Ints32 = self.tokens[slot, : self.lengths[slot]].cpu().numpy()
        return found

    def _flush(self) -> None:
        self.apply(tuple(self._staging.send(*self.changes())))

    def check_window(self, slots: Ints, starts: Ints) -> None:
        """
        Raises:
            PlanError: a span begins where its row has no block any more.
        """
        if int(self.blocks[:, slots, starts // self._block_size].min(initial=0)) < 0:
            raise PlanError("a position was planned behind the window of its row")

    def advance(self, slots: Ints) -> None:
        """A step that was launched appends a token to each of them by itself."""
        self.lengths[slots] += 1

    def changes(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Changes not yet sent to the device: places and values of block tables, then of tokens."""
        width, length = self.blocks.shape[2], self.tokens.shape[1]
        places, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for group, slot, begin, end in self._tables_changed:
            first = (group * (self.scratch + 1) + slot) * width
            places.append(np.arange(first + begin, first + end))
            values.append(self.blocks[group, slot, begin:end].astype(np.int64))
        known = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for slot, begin, tokens in self._tokens_known:
            known[0].append(np.arange(slot * length + begin, slot * length + begin + tokens.size))
            known[1].append(tokens.astype(np.int64))
        self._tables_changed, self._tokens_known = [], []
        return np.concatenate(places), np.concatenate(values), np.concatenate(known[0]), np.concatenate(known[1])

    def apply(self, changes: tuple[Tensor, ...]) -> None:
        """changes: as `changes` gave them, on the device."""
        for target, places, values in ((self.block_tables, *changes[:2]), (self.tokens, *changes[2:])):
            if places.numel():
                target.view(-1).index_copy_(0, places, values.to(torch.int32))

    def _write(self, slot: int, begin: int, tokens: NDArray[np.int32]) -> None:
        if not begin:  # of a new row: where a place is named twice, either value may end up there
            self._tokens_known = [known for known in self._tokens_known if known[0] != slot]
        self._tokens_known.append((slot, begin, tokens))

    def _copy_tokens(self, slots: Ints, parents: Ints, kept: Ints, chosen: Ints) -> None:
        self._flush()
        here, there, ends, tokens = self._staging.send(slots, parents, kept, chosen)
        longest = int(kept.max())
        self.tokens[here, :longest] = self.tokens[there, :longest]
        self.tokens[here, ends] = tokens.to(torch.int32)

    def _copy_tables(self, slots: Ints, parents: Ints) -> None:
        super()._copy_tables(slots, parents)
        for slot in slots.tolist():
            for group, end in enumerate(self.num_blocks[:, slot].tolist()):
                self._tables_changed.append((group, slot, 0, end))

    def _resize(self, old: int, new: int) -> None:
        """Larger memory on the device; graphs over the smaller one are of no use any more."""
        device = self._device.torch_device
        tokens = torch.zeros(new + 1, self.tokens.shape[1], dtype=torch.int32, device=device)
        tables = torch.full(
            (self.num_groups, new + 1, self.blocks.shape[2]), self._null, dtype=torch.int32, device=device
        )
        if old:
            tokens[:old] = self.tokens[:old]
            tables[:, :old] = self.block_tables[:, :old]
        self.tokens, self.block_tables = tokens, tables
        self.generation += 1
