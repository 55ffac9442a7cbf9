"""Whose guide is compiled next."""

import sys

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.guide.fair_queue import HALF_LIFE, MOST_WAITING, PATIENCE, SMALL_BYTES, TooManyWaiting, Turns
from troupellm.actors.input.long_texts import PlainTurns

pytestmark = pytest.mark.anyio


class HandClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def timestamp(self) -> float:
        return self.seconds


class Stage:
    """Guides that take as long as they say, one at a time, by a clock that nothing else moves."""

    def __init__(self, parallel: int = 1) -> None:
        self.clock = HandClock()
        self.turns = Turns(parallel, self.clock)
        self.order: list[str] = []

    async def compile(self, name: str, seconds: float, ticket) -> None:
        async with self.turns.turn(ticket):
            self.order.append(name)
            self.clock.seconds += seconds
            await checkpoint()

    async def play(self, *asked: tuple[str, str, int, float]) -> list[str]:
        """Name, client, size, seconds: all at once, in this order."""
        async with anyio.create_task_group() as group:
            for name, tenant, size, seconds in asked:
                group.start_soon(self.compile, name, seconds, self.turns.queue(tenant, size))
        order, self.order = self.order, []
        return order


async def test_a_client_with_many_slow_ones_waits_behind_the_others():
    stage = Stage()
    slow = [(f"slow {number}", "a", 20, 1.0) for number in range(24)]
    order = await stage.play(*slow, ("new", "b", 5000, 0.01), ("newer", "b", 5000, 0.01))
    assert order[:3] == ["slow 0", "new", "newer"]
    again = await stage.play(slow[0], slow[1], ("other", "c", 9000, 0.01))
    assert again == ["slow 0", "other", "slow 1"]
    stage.clock.seconds += 20 * HALF_LIFE
    assert await stage.play(("first", "d", 20, 0.0), *slow[:1], ("last", "b", 20, 0.0)) == ["first", "slow 0", "last"]


async def test_small_ones_overtake_large_ones_where_clients_are_not_told_apart():
    stage = Stage()
    slow = [(f"slow {number}", "", 20_000, 0.5) for number in range(6)]
    order = await stage.play(*slow, ("boolean", "", 18, 0.01), ("number", "", 17, 0.01))
    assert order[:3] == ["slow 0", "boolean", "number"]
    assert order[3:] == [f"slow {number}" for number in range(1, 6)]


async def test_a_large_one_does_not_wait_for_ever():
    stage = Stage()
    small = [(f"small {number}", "", 20, 1.0) for number in range(12)]
    order = await stage.play(("first", "", 20, 0.0), ("large", "", 50_000, 0.0), *small)
    assert order.index("large") == 1 + PATIENCE


async def test_a_client_may_have_so_many_waiting_and_others_theirs():
    stage = Stage()
    held = stage.turns.queue("z", 1)
    tickets = [stage.turns.queue("a", 10) for _ in range(MOST_WAITING)]
    with pytest.raises(TooManyWaiting):
        stage.turns.queue("a", 10)
    other = stage.turns.queue("b", 10)
    unknown = [stage.turns.queue("", 10) for _ in range(MOST_WAITING + 1)]
    assert len(stage.turns) == 2 * MOST_WAITING + 2
    async with anyio.create_task_group() as group:
        for ticket in (held, *tickets, other, *unknown):
            group.start_soon(stage.compile, "", 0.0, ticket)
    assert len(stage.turns) == 0


async def test_a_turn_that_nobody_takes_is_the_next_ones():
    stage = Stage(parallel=2)
    async with anyio.create_task_group() as group:
        for _ in range(4):  # two have their turn, two wait
            group.start_soon(stage.compile, "never", 0.0, stage.turns.queue("a", 1))
        group.cancel_scope.cancel()
    assert len(stage.turns) == 0
    assert await stage.play(("x", "b", 1, 0.0), ("y", "b", 1, 0.0), ("z", "b", 1, 0.0)) == ["x", "y", "z"]


async def test_large_guides_leave_one_turn_to_a_small_one():
    turns = Turns(2, HandClock(), for_small=1)
    large = [turns.queue("a", SMALL_BYTES + 1) for _ in range(2)]
    small = turns.queue("b", SMALL_BYTES)
    assert [ticket.turn.is_set() for ticket in (*large, small)] == [True, False, True]
    async with turns.turn(large[0]):
        assert not large[1].turn.is_set()
    assert large[1].turn.is_set()


async def _take(turns: Turns, tenant: str) -> None:
    async with turns.turn(turns.queue(tenant, 20)):
        await checkpoint()


async def _take_plainly(turns: PlainTurns, tenant: str) -> None:
    async with turns.turn(tenant):
        await checkpoint()


@pytest.mark.parametrize("plain", [False, True])
async def test_a_turn_costs_no_more_where_a_client_has_many_waiting(plain):
    async def calls(count: int) -> int:
        """Of functions, until all have had their turn."""
        turns, seen = PlainTurns(2) if plain else Turns(2, HandClock()), 0

        def see(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        async with anyio.create_task_group() as group:
            sys.setprofile(see)
            for number in range(count):
                group.start_soon(_take_plainly if plain else _take, turns, f"client {number % 2}")
        sys.setprofile(None)
        assert len(turns) == 0
        return seen

    await calls(1)
    assert await calls(100) < 5 * await calls(25)
