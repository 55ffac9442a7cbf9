"""A few turns at once for work of about one size: keys take turns, at a cost that does not grow with the queue."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from troupellm.actors.runtime.key_turns import KeyTurns


class _Place(msgspec.Struct, eq=False):
    tenant: str
    turn: anyio.Event


class PlainTurns:
    """The caller bounds how many wait."""

    def __init__(self, parallel: int) -> None:
        self._free = parallel
        self._waiting = KeyTurns[_Place](lambda place: place.tenant)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it.

        Args:
            tenant: the key whose turn it is; "" where keys are not told apart.
        """
        place = _Place(tenant, anyio.Event())
        self._waiting.append(place)
        self._grant()
        try:
            await place.turn.wait()
            yield
        finally:
            if place.turn.is_set():
                self._free += 1
                self._grant()
            else:
                self._waiting.remove(place)

    def _grant(self) -> None:
        while self._free and len(self._waiting):
            self._free -= 1
            self._waiting.popleft().turn.set()
