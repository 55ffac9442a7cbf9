"""Whose guide is compiled next: everybody gets a turn, whatever others have compiled."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from troupellm.actors.ports import Clock

MOST_WAITING: Final = 128
"""Guides of one client that wait for their turn; where clients are not told apart, only admission bounds them."""
HALF_LIFE: Final = 10.0
"""Seconds after which half of what a client has used is forgotten."""
ALIKE: Final = 0.1
"""Seconds of compiling that make no difference."""
_FORGOTTEN: Final = 1e-3
PATIENCE: Final = 5.0
"""Seconds after which a large guide waits no longer behind small ones."""
SMALL_BYTES: Final = 16_384
"""A larger guide is a large one."""


class TooManyWaiting(Exception):
    """The client has as many guides waiting as it may."""


class Ticket(msgspec.Struct, eq=False):
    """A place among those that wait, and then a turn."""

    tenant: str
    size: int
    since: float
    turn: anyio.Event


class Turns:
    """Clients that have used less time lately go first, then small guides, then those that came first."""

    def __init__(self, parallel: int, clock: Clock, *, for_small: int = 0) -> None:
        """for_small: turns that large guides leave free, of several."""
        self._free = parallel
        self._free_large = max(1, parallel - for_small)
        """Turns that large guides may still take."""
        self._clock = clock
        self._waiting: list[Ticket] = []
        self._used: dict[str, tuple[float, float]] = {}
        """Seconds, and when that was so; by client."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def queue(self, tenant: str, size: int, *, most: int = MOST_WAITING) -> Ticket:
        """Begin to wait; `turn` must follow.

        Args:
            tenant: whose guide it is; "" where nobody is told apart.
            size: bytes of the guide.
            most: guides of one client that may wait.

        Raises:
            TooManyWaiting: the client has enough of them.
        """
        if tenant and sum(other.tenant == tenant for other in self._waiting) >= most:
            raise TooManyWaiting
        ticket = Ticket(tenant, size, self._clock.now(), anyio.Event())
        self._waiting.append(ticket)
        self._grant()
        return ticket

    @asynccontextmanager
    async def turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for the ticket's turn, and have it; its time is the client's."""
        try:
            await ticket.turn.wait()
            begin = self._clock.now()
            try:
                yield
            finally:
                now = self._clock.now()
                self._charge(ticket.tenant, now - begin, now)
        finally:
            if ticket.turn.is_set():
                self._free += 1
                self._free_large += ticket.size > SMALL_BYTES
                self._grant()
            else:
                self._waiting.remove(ticket)

    def _grant(self) -> None:
        """Turns to those that are first."""
        while self._free:
            now = self._clock.now()
            able = [ticket for ticket in self._waiting if ticket.size <= SMALL_BYTES or self._free_large]
            if not able:
                return
            first = min(able, key=lambda waiting: self._rank(waiting, now))
            self._waiting.remove(first)
            self._free -= 1
            self._free_large -= first.size > SMALL_BYTES
            first.turn.set()

    def _rank(self, waiting: Ticket, now: float) -> tuple[int, int, float]:
        used = int(self._used_by(waiting.tenant, now) / ALIKE)
        size = waiting.size.bit_length() if now - waiting.since < PATIENCE else 0  # to a power of two
        return used, size, waiting.since

    def _used_by(self, tenant: str, now: float) -> float:
        seconds, then = self._used.get(tenant, (0.0, now))
        return float(seconds * 0.5 ** ((now - then) / HALF_LIFE))

    def _charge(self, tenant: str, seconds: float, now: float) -> None:
        self._used[tenant] = self._used_by(tenant, now) + seconds, now
        for other in [other for other in self._used if self._used_by(other, now) < _FORGOTTEN]:
            del self._used[other]
