"""Rows of a step whose tokens see those of their chunk alone."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def in_chunks(
    tables: NDArray[np.int32], starts: Ints, counts: Ints, chunk: int, block_size: int
) -> tuple[NDArray[np.int32], Ints, Ints]:
    """Rows cut where chunks end. Each part has the blocks of its chunk alone, and positions within it.

    Args:
        tables: block ids [rows, width].
        starts: position of each row's first token, [rows].
        counts: tokens of each row, at least one, [rows].
        chunk: positions, a multiple of `block_size`.

    Returns:
        tables [parts, width], starts [parts] and counts [parts], in the order of the rows' tokens.
    """
    ends = starts + counts
    first = starts // chunk
    parts = (ends - 1) // chunk - first + 1
    row = np.repeat(np.arange(starts.size), parts)
    number = first[row] + np.arange(row.size) - np.repeat(np.cumsum(parts) - parts, parts)
    begins, stops = np.maximum(starts[row], number * chunk), np.minimum(ends[row], (number + 1) * chunk)
    width, each = tables.shape[1], chunk // block_size
    columns = number[:, None] * each + np.arange(min(each, width))
    return tables[row[:, None], np.minimum(columns, width - 1)], begins - number * chunk, stops - begins
