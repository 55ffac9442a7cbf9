"""Long texts take turns: two at once, the keys one after another, and shorter texts overtake them."""

from functools import partial

import anyio
import pytest

from troupellm.actors.guide.fair_queue import MOST_WAITING
from troupellm.actors.input.long_texts import LONG_LETTERS, PARALLEL, PARALLEL_SHORT, LongTexts
from troupellm.models.chat_template.template import SlowTemplate
from troupellm.protocol.errors import RateLimited

pytestmark = pytest.mark.anyio

LONG = LONG_LETTERS + 1


class Steps:
    """A clock that a test moves."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


class Gated:
    """Threads whose calls end when the test says so, each after a second of the clock."""

    def __init__(self, clock: Steps) -> None:
        self.clock = clock
        self.running = self.most = 0
        self.begun: list[str] = []
        self.gate = anyio.Event()

    async def run(self, function, *args):
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.append(function())
        try:
            await self.gate.wait()
            self.clock.seconds += 1.0
        finally:
            self.running -= 1
        return function(*args)


@pytest.fixture
def threads() -> Gated:
    return Gated(Steps())


@pytest.fixture
def texts(threads) -> LongTexts:
    return LongTexts(threads, threads.clock)


async def test_two_run_at_once_and_the_keys_take_turns(texts, threads):
    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(texts.run, "many", LONG, lambda number=number: f"many {number}")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(texts.run, "one", LONG, lambda: "one")
        await anyio.wait_all_tasks_blocked()
        assert threads.begun == ["many 0", "many 1"]
        threads.gate.set()
    assert threads.most == PARALLEL
    assert threads.begun.index("one") == PARALLEL
    assert len(threads.begun) == 7


async def test_shorter_texts_wait_for_no_turn(texts, threads):
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(texts.run, "", LONG, lambda: "long")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(texts.run, "", LONG_LETTERS, lambda: "short")
        await anyio.wait_all_tasks_blocked()
        assert threads.begun == ["long", "long", "short"]
        threads.gate.set()


async def test_a_caller_that_leaves_keeps_its_turn_until_its_thread_ends(texts, threads):
    scopes = [anyio.CancelScope() for _ in range(PARALLEL)]

    async def leave(scope: anyio.CancelScope) -> None:
        with scope:
            await texts.run("", LONG, lambda: "left")

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(leave, scope)
        await anyio.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
        group.start_soon(texts.run, "", LONG, lambda: "next")
        await anyio.wait_all_tasks_blocked()
        assert threads.begun == ["left", "left"]
        threads.gate.set()
    assert threads.begun == ["left", "left", "next"]


async def test_more_texts_of_one_key_than_may_wait_are_refused(texts, threads):
    async with anyio.create_task_group() as group:
        for _ in range(PARALLEL + MOST_WAITING):
            group.start_soon(texts.run, "key", LONG, lambda: "")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RateLimited, match="wait to be tokenized"):
            await texts.run("key", LONG, lambda: "")
        threads.gate.set()


async def test_a_slow_template_waits_for_a_turn_and_has_more_time_then(texts, threads):
    def slow():
        raise SlowTemplate

    async with anyio.create_task_group() as group:
        for _ in range(PARALLEL):
            group.start_soon(texts.run, "", LONG, lambda: "long")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(partial(texts.run_twice, "", 1, slow, lambda: "patient"))
        await anyio.wait_all_tasks_blocked()
        assert threads.begun == ["long", "long"]
        threads.gate.set()
    assert threads.begun[-1] == "patient"


async def test_short_chats_of_a_key_take_turns_with_those_of_others(texts, threads):
    async with anyio.create_task_group() as group:
        for number in range(32):
            group.start_soon(texts.run, "many", 1, lambda number=number: f"many {number}")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(texts.run, "one", 1, lambda: "one")
        await anyio.wait_all_tasks_blocked()
        assert len(threads.begun) == PARALLEL_SHORT
        threads.gate.set()
    assert threads.begun.index("one") <= 2 * PARALLEL_SHORT
