"""How many lines of batches are inside the engine: as many as leave room for interactive requests."""

import anyio

from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.server.host.served_engine import ServedEngine

LOOK_SECONDS = 0.05
"""How soon room that others have left is seen."""
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
