"""Cosines of many vectors: right, and the event loop runs on meanwhile."""

from array import array
from math import sqrt
from random import Random

import anyio
import anyio.lowlevel
import pytest

from troupellm.actors.client.cosines import NUMBERS_AT_ONCE, cosines

pytestmark = pytest.mark.anyio


def vectors(count: int, length: int, seed: int) -> list[bytes]:
    draw = Random(seed)
    return [array("f", [draw.gauss(0, 1) for _ in range(length)]).tobytes() for _ in range(count)]


def expected(first: bytes, second: bytes) -> float:
    one, other = array("f", first), array("f", second)
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / sqrt(sum(a * a for a in one) * sum(b * b for b in other))


@pytest.mark.parametrize("count", [1, 2, 7])
async def test_one_with_each_and_each_with_its_own(monkeypatch, count):
    monkeypatch.setattr("troupellm.actors.client.cosines.NUMBERS_AT_ONCE", 48)
    first, second = vectors(count, 16, 1), vectors(count, 16, 2)
    assert await cosines(first, second) == pytest.approx([expected(*pair) for pair in zip(first, second, strict=True)])
    assert await cosines(first[:1], second) == pytest.approx([expected(first[0], other) for other in second])


async def test_of_nothing_and_of_zero():
    zero, one = bytes(16), array("f", [1, 2, 3, 4]).tobytes()
    assert await cosines([zero], [one, zero]) == [0.0, 0.0]
    assert await cosines([one, one], [zero, one]) == pytest.approx([0.0, 1.0])
    assert await cosines([one], []) == []


async def test_other_tasks_run_between_pieces_of_cosines():
    rounds = 0

    async def other() -> None:
        nonlocal rounds
        while True:
            await anyio.lowlevel.checkpoint()
            rounds += 1

    length, count = 4096, 320
    row = vectors(1, length, 3)
    async with anyio.create_task_group() as group:
        group.start_soon(other)
        found = await cosines(row, row * count)
        group.cancel_scope.cancel()
    assert found == pytest.approx([1.0] * count)
    assert rounds >= count * length // NUMBERS_AT_ONCE - 1
