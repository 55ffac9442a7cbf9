"""Trees of drafts: tokens behind a row's own that see the row's tokens and their ancestors, but not their siblings.

The nodes of a row's tree are in consecutive places of its cache, a parent before its children. A node's position in the
text is given by its depth. (Miao et al., "SpecInfer", 2023; Cai et al., "Medusa", 2024.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_TREE = 1 << 30
"""Value in `TreeMask.bases` of rows without a tree: larger than all places."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The nodes that tokens of trees see. Made for one window, since ancestors may be outside of it."""

    bases: Ints
    """[rows] place of the first node of a row's tree, NO_TREE if it has none. Its nodes see all keys before it."""
    seen: NDArray[np.uint64]
    """[tokens] of a node: bit j is set if the node at `bases + j` is seen, itself included; 0 for other tokens."""
    positions: Ints
    """[tokens] in the text."""

    def of(self, rows: Ints, tokens: Ints) -> "TreeMask":
        """The mask of some rows alone, and of their tokens."""
        return TreeMask(self.bases[rows], self.seen[tokens], self.positions[tokens])

    def visible(self, row: int, token: int, places: Ints) -> NDArray[np.bool_]:
        """True for the places whose keys the tree does not hide from a row's token."""
        behind = places - self.bases[row]
        bits = self.seen[token] >> np.clip(behind, 0, 63).astype(np.uint64)
        found: NDArray[np.bool_] = (behind < 0) | ((behind < 64) & ((bits & np.uint64(1)) == 1))
        return found

    def first(self, token: int, window: int) -> int:
        """The first place that a token sees; window 0 is none."""
        return max(0, int(self.positions[token]) + 1 - window) if window else 0
