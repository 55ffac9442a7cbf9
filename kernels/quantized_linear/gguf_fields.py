"""The numbers inside blocks of GGUF files, and the ways in which blocks pack them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fields:
    """Unpacked blocks: w = value * scale + offset, where a value is a code or the table's entry for it.

    Attributes:
        codes: [blocks, weights]; int8 values, or uint8 places in `table`.
        scale: float32 [blocks, groups], each of an equal run of weights.
        offset: like `scale`, or None.
        table: sixteen values of eight bits, or None where the codes are the values.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    table: tuple[int, ...] | None = None

    def weights(self) -> Tensor:
        """float32 [blocks, weights]."""
        grouped = self._values().view(*self.scale.shape, -1) * self.scale[..., None]
        return (grouped if self.offset is None else grouped + self.offset[..., None]).flatten(1)

    def in_rows(self, rows: int) -> "Fields":
        """The same tensors with one row per row of the weight instead of one per block."""
        offset = None if self.offset is None else self.offset.reshape(rows, -1)
        return Fields(self.codes.reshape(rows, -1), self.scale.reshape(rows, -1), offset, self.table)

    def _values(self) -> Tensor:
        if self.table is None:
            return self.codes.float()
        table = torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)
        return table.index_select(0, self.codes.flatten().int()).view(self.codes.shape)


def float16_at(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block, as float32 [blocks, 1]."""
    return blocks[:, begin : begin + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def unpack(packed: Tensor, run: int, shifts: Iterable[int], mask: int) -> Tensor:
    """Numbers of a few bits that share bytes.

    Args:
        packed: uint8 [blocks, bytes].
        run: bytes of which all numbers at the first shift come first, then all at the second, and so on.
        shifts: where the numbers of a byte begin.
        mask: of the bits of one number.

    Returns:
        uint8 [blocks, bytes * number of shifts].
    """
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    return torch.cat([(runs >> shift) & mask for shift in shifts], dim=2).flatten(1)


def unpack_nibbles(packed: Tensor, run: int) -> Tensor:
    """As `unpack`, of two numbers of four bits per byte."""
    return unpack(packed, run, (0, 4), 15)


def unpack_pairs(packed: Tensor, run: int) -> Tensor:
    """As `unpack`, of four numbers of two bits per byte."""
    return unpack(packed, run, (0, 2, 4, 6), 3)


def unpack_bits(packed: Tensor, run: int) -> Tensor:
    """As `unpack`, of eight bits per byte."""
    return unpack(packed, run, range(8), 1)


def counting_from(first: int) -> tuple[int, ...]:
    """The table whose entries count up from `first`."""
    return tuple(range(first, first + 16))
