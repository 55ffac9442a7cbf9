"""Cosines of vectors, in pieces that leave the event loop free between them."""

from collections.abc import Sequence

import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

NUMBERS_AT_ONCE = 131_072
"""Of the vectors that are compared in one go: about half a millisecond."""

Rows = NDArray[np.float64]


async def cosines(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """The cosine of the angle between vectors of the same length; 0 where one of them is zero.

    Args:
        first: float32; one for all of `second`, or one for each.
        second: float32.
    """
    found: list[float] = []
    shared = _rows(first) if len(first) == 1 else None
    size = max(1, NUMBERS_AT_ONCE // max(1, len(second[0]) // 4)) if second else 1
    for start in range(0, len(second), size):
        others = _rows(second[start : start + size])
        ones = _rows(first[start : start + size]) if shared is None else shared
        found += _compared(ones, others)
        await anyio.lowlevel.checkpoint()
    return found


def _rows(vectors: Sequence[bytes]) -> Rows:
    """Unit vectors, [vectors, numbers]; one that is zero stays so."""
    rows = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(len(vectors), -1).astype(np.float64)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    rows /= np.where(lengths > 0, lengths, 1.0)[:, None]
    return rows


def _compared(ones: Rows, others: Rows) -> list[float]:
    found: list[float] = np.einsum("ij,ij->i", np.broadcast_to(ones, others.shape), others).tolist()
    return found
