"""Lines of batches inside the engine: as many as leave room for interactive requests, shared between the owners."""

import math

import anyio

from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.server.host.served_engine import ServedEngine

LOOK_SECONDS = 0.05
"""How soon room that others have left is seen."""
CAREFUL_SECONDS = 0.1
"""After a limit was reached, the next line is asked when the one before has its answer, or so much later."""
_RESERVE_SHARE = 4
"""One in so many rows of a step is kept free of lines."""


class Governor:
    """`inside` lines are on their way. In line are those who want to send one, first come first served."""

    def __init__(self, engine: ServedEngine, most: int | None = None) -> None:
        rows = engine.config.scheduler.max_num_seqs
        self.most = min(most or max(1, rows // 2), max(1, rows - rows // _RESERVE_SHARE))
        self.inside = 0
        self._engine = engine
        self._turn = anyio.Lock()
        self._left = anyio.Event()

    def share(self, most: int | None) -> "Share":
        """Of one owner, which may have `most` lines inside; None has no limit of its own."""
        return Share(min(self.most, most or self.most), self)

    async def enter(self) -> None:
        """Wait for room."""
        async with self._turn:
            while not self._has_room():
                self._left = anyio.Event()
                with anyio.move_on_after(LOOK_SECONDS):
                    await self._left.wait()
            self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self._left.set()

    def _has_room(self) -> bool:
        if self.inside >= self.most or self._engine.state != "ready":
            return False
        return has_room(self._engine.snapshot(), self._engine.config.scheduler.max_num_seqs, self.inside)


def has_room(snapshot: EngineSnapshot, rows: int, inside: int) -> bool:
    """True if one more line leaves a part of the rows to others, and no request waits in front of it."""
    scheduler = snapshot.scheduler
    if snapshot.paused or snapshot.sleep_level is not None or snapshot.unready is not None:
        return False
    busy = max(scheduler.running, inside)
    return scheduler.waiting == 0 and busy < max(1, rows - rows // _RESERVE_SHARE)


class Share:
    """Lines of one owner that are in flight or wait to be asked, and a pause while a limit of its key is reached."""

    def __init__(self, most: int, governor: Governor | None = None, *, longest_pause: float = math.inf) -> None:
        """
        Args:
            most: lines that may be out.
            governor: of the owners together; None lets all in.
        """
        self.most = most
        self._governor = governor
        self._longest_pause = longest_pause
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
            if self._governor is not None:
                await self._governor.enter()

    def leave(self) -> None:
        if self._governor is not None:
            self._governor.leave()

    def pause(self, seconds: float) -> None:
        """No line is asked for so long, unless one that was under way ends: its place or its tokens may be enough."""
        self._until = anyio.current_time() + min(seconds, self._longest_pause)
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
