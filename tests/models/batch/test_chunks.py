"""Rows cut at the ends of chunks: each token sees its chunk up to itself, in the blocks that hold it."""

import numpy as np
import pytest

from troupellm.models.batch.chunks import in_chunks

CHUNK, SIZE = 8, 4


@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0], [1]), ([7], [1]), ([8], [1]), ([3], [30]), ([0, 15, 16, 9], [8, 2, 9, 1])],
)
def test_each_token_is_at_its_place_within_its_chunk(starts: list[int], counts: list[int]) -> None:
    tables = np.arange(len(starts) * 12, dtype=np.int32).reshape(len(starts), 12)
    cut, begins, amounts = in_chunks(tables, np.array(starts), np.array(counts), CHUNK, SIZE)
    assert amounts.sum() == sum(counts)
    wanted = [(row, start + place) for row, start in enumerate(starts) for place in range(counts[row])]
    found = [
        (part, int(begin) + place)
        for part, (begin, count) in enumerate(zip(begins, amounts, strict=True))
        for place in range(count)
    ]
    for (row, position), (part, place) in zip(wanted, found, strict=True):
        assert place == position % CHUNK
        assert cut[part, place // SIZE] == tables[row, position // SIZE]
