"""Places of a row's cache entries after a gap: positions that the drafter has not seen.

While drafts do not pay, the drafter sleeps, and entries (keys and values) of those positions are never made. A row that
continues later leaves them out. It keeps the whole blocks of entries before its first gap, skips the blocks in between,
and its next entry begins the block that contains its position. Keys are rotated by their position in the text and do
not depend on their place. So attention sees only true entries, in their order and at their true distances.

The places behind a gap are blocks that the row itself is about to write, as those of its positions are.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class MissingKV:
    """By slot, where entries lie.

    Attributes:
        some: any row has a gap.
    """

    def __init__(self, block_size: int, *, whole: bool) -> None:
        """whole: blocks are kept for as long as their row is there, and not for a window only."""
        self.some = False
        self._block_size, self._whole = block_size, whole
        self._kept: Ints = np.zeros(0, dtype=np.int64)
        """Blocks in front of the gap."""
        self._skipped: Ints = np.zeros(0, dtype=np.int64)
        """Blocks behind those that nothing is read of."""
        self._shift: Ints = np.zeros(0, dtype=np.int64)
        """Distance of entries behind the gap from their positions, not counting skipped blocks; 0 is no gap."""

    def close(self, slot: int) -> None:
        """There is another row in a slot."""
        missing = slot + 1 - self._shift.size
        if missing > 0:
            more = max(missing, self._shift.size)
            self._kept, self._skipped, self._shift = (
                np.pad(part, (0, more)) for part in (self._kept, self._skipped, self._shift)
            )
        self._kept[slot] = self._skipped[slot] = self._shift[slot] = 0
        self.some = self.some and bool(self._shift.any())

    def close_all(self) -> None:
        """Forget all rows."""
        self._kept[:], self._skipped[:], self._shift[:], self.some = 0, 0, 0, False

    def may_open(self, starts: Ints) -> NDArray[np.bool_]:
        """True for rows that may continue from those positions [rows]. Where blocks are kept for a window, entries must
        be no nearer to each other than their positions, or freed blocks would be read."""
        found: NDArray[np.bool_] = starts % self._block_size == 0
        return found | self._whole

    def open(self, slots: Ints, ends: Ints, starts: Ints) -> None:
        """Some rows [rows] have entries up to `ends`, and go on from `starts`, behind that."""
        # The entries between two gaps are few.
        kept = np.where(self._shift[slots] > 0, self._kept[slots], ends // self._block_size)
        if not self._whole:
            kept[:] = 0
        self._kept[slots] = kept
        self._skipped[slots] = starts // self._block_size - kept
        self._shift[slots] = starts - kept * self._block_size
        self.some = True

    def shift(self, slots: Ints) -> Ints:
        """Distance of each row's next entries from their positions, [rows]."""
        found: Ints = self._shift[slots]
        return found

    def table(self, blocks: NDArray[np.int32], slots: Ints, width: int) -> NDArray[np.int32]:
        """The first blocks that are read of rows, [rows, width].

        Args:
            blocks: [slots, blocks of a row].
        """
        columns = np.arange(width) + self._skipped[slots][:, None] * (np.arange(width) >= self._kept[slots][:, None])
        found: NDArray[np.int32] = blocks[slots[:, None], np.minimum(columns, blocks.shape[1] - 1)]
        return found
