"""A step is cut into pieces that cover every position once and in order."""

import numpy as np
import pytest

from troupellm.models.batch.spans import Spans


def spans_of(starts: list[int], counts: list[int]) -> Spans:
    rows = np.arange(len(starts))
    return Spans(rows, rows + 100, np.array(starts), np.array(counts))


def positions(spans: Spans) -> list[tuple[int, int, int]]:
    return [
        (row, slot, position)
        for row, slot, start, count in zip(spans.rows, spans.slots, spans.starts, spans.counts, strict=True)
        for position in range(start, start + count)
    ]


@pytest.mark.parametrize("limit", [1, 3, 7, 8, 20, 21])
def test_pieces_cover_every_position_once(limit: int) -> None:
    whole = spans_of([4, 0, 9, 2], [1, 12, 1, 7])
    pieces = whole.pieces(limit)
    assert [place for piece in pieces for place in positions(piece)] == positions(whole)
    sizes = [int(piece.counts.sum()) for piece in pieces]
    assert max(sizes) <= limit
    assert len(sizes) == -(-21 // limit)
    assert max(sizes) == -(-21 // len(sizes)), "the pieces are not about equally large"
    assert all((piece.counts > 0).all() for piece in pieces)


def test_a_small_step_stays_whole() -> None:
    whole = spans_of([4, 0], [1, 12])
    assert whole.pieces(13)[0] is whole
