"""The share of one owner's batches: a number of lines, and a pause while a limit of its key is reached."""

import math

import anyio

from troupellm.server.batches.concurrency import Governor

CAREFUL_SECONDS = 0.1
"""After a limit was reached, the next line is asked when the one before has its answer, or so much later."""


class Share:
    """Implements `asking.Room`. Lines that are out are in flight, or wait to be asked again."""

    def __init__(self, governor: Governor, most: int | None = None) -> None:
        """most: lines that the engine lets in at once for this owner; None has no limit of its own."""
        self.most = min(governor.most, most or governor.most)
        self._governor = governor
        self._claims = anyio.Semaphore(self.most)
        self._order = anyio.Lock()
        self._until = -math.inf
        self._careful = 0
        self._news = anyio.Event()

    async def claim(self) -> None:
        """For a line that is read; waits while as many are out as may be."""
        await self._claims.acquire()

    def release(self) -> None:
        """It has its result."""
        self._claims.release()

    async def enter(self) -> None:
        """Wait for room. Of each owner only one line at a time stands where all owners do: they take turns there."""
        async with self._order:
            if self._careful:
                await self._news_within(CAREFUL_SECONDS)
            while (left := self._until - anyio.current_time()) > 0:
                await self._news_within(left)
            await self._governor.enter()

    def leave(self) -> None:
        self._governor.leave()

    async def pause(self, seconds: float) -> None:
        """No line is asked for so long, unless one that was under way ends: its place or its tokens may be enough."""
        self._until = anyio.current_time() + seconds
        self._careful = self.most
        self._news.set()

    def ended(self) -> None:
        self._until = -math.inf
        self._careful = max(0, self._careful - 1)
        self._news.set()

    async def _news_within(self, seconds: float) -> None:
        self._news = anyio.Event()
        with anyio.move_on_after(seconds):
            await self._news.wait()
