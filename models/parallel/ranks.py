"""The ranks of one model as a rank sees them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from troupellm.kernels.meeting import SumOfRanks

IDLE_SECONDS = 1.0
"""A rank that hears nothing looks so often whether the others still run."""


class Ranks(SumOfRanks, Protocol):
    """All ranks make the same calls in the same order: `tell` of the leader and `hear` of the others are one call.

    Every call raises RankLost when another rank has ended.
    """

    number: int
    """Of this rank; the leader is 0."""
    size: int

    def join(self) -> None:
        """Wait until all ranks are there."""

    def meet(self) -> None:
        """Wait until all ranks call this, however long that takes."""

    def tell(self, data: bytes) -> None:
        """Of the leader, to all others."""

    def hear(self) -> bytes:
        """The leader's next bytes, however long that takes."""

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        """Parts of rows, beside each other at the leader.

        Args:
            part: float32 [rows, width of this rank], contiguous.
            widths: of all ranks.
            out: the leader's, float32 [rows, sum of widths], contiguous.
        """

    def close(self) -> None:
        """Leave the others. May be called twice."""
