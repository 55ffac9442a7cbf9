"""The order in which guides are compiled: every tenant gets turns, however many guides other tenants have."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from troupellm.actors.runtime.ports import Clock

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


class CompileTicket(msgspec.Struct, eq=False):
    """A place among those that wait, and then a turn."""

    tenant: str
    size: int
    since: float
    turn: anyio.Event


class _Line:
    """The tickets of one client: those of about one size in a queue of their own."""

    __slots__ = ("_queues", "size")

    def __init__(self) -> None:
        self._queues: dict[tuple[int, bool], deque[CompileTicket]] = {}
        """By the bits of their sizes, and whether they are large; no queue is empty."""
        self.size = 0

    def add(self, ticket: CompileTicket) -> None:
        self._queues.setdefault(_kind(ticket), deque()).append(ticket)
        self.size += 1

    def remove(self, ticket: CompileTicket) -> None:
        queue = self._queues[_kind(ticket)]
        queue.remove(ticket)
        self.size -= 1
        if not queue:
            del self._queues[_kind(ticket)]

    def first(self, now: float, *, with_large: bool) -> "tuple[int, float, CompileTicket] | None":
        """The next ticket behind the bits of its size, zero where it has waited long, and when it came."""
        best: tuple[int, float, CompileTicket] | None = None
        for (bits, large), queue in self._queues.items():
            if large and not with_large:
                continue
            ticket = queue[0]
            rank = bits if now - ticket.since < PATIENCE else 0, ticket.since
            if best is None or rank < best[:2]:
                best = *rank, ticket
        return best


def _kind(ticket: CompileTicket) -> tuple[int, bool]:
    return ticket.size.bit_length(), ticket.size > SMALL_BYTES


class Turns:
    """Clients that have used less time lately go first, then small guides, then those that came first."""

    def __init__(self, parallel: int, clock: Clock, *, for_small: int = 0) -> None:
        """for_small: turns that large guides leave free, of several."""
        self._free = parallel
        self._free_large = max(1, parallel - for_small)
        """Turns that large guides may still take."""
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        """By client; no line is empty."""
        self._used: dict[str, tuple[float, float]] = {}
        """Seconds, and when that was so; by client."""

    def __len__(self) -> int:
        """How many wait."""
        return sum(line.size for line in self._lines.values())

    def queue(self, tenant: str, size: int, *, most: int = MOST_WAITING) -> CompileTicket:
        """Begin to wait; `turn` must follow.

        Args:
            tenant: the guide's tenant; "" where tenants are not told apart.
            size: bytes of the guide.
            most: guides of one client that may wait.

        Raises:
            TooManyWaiting: the client has enough of them.
        """
        line = self._lines.get(tenant)
        if tenant and line is not None and line.size >= most:
            raise TooManyWaiting
        if line is None:
            line = self._lines[tenant] = _Line()
        ticket = CompileTicket(tenant, size, self._clock.now(), anyio.Event())
        line.add(ticket)
        self._grant()
        return ticket

    @asynccontextmanager
    async def turn(self, ticket: CompileTicket) -> AsyncIterator[None]:
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
                self._remove(ticket)

    def _remove(self, ticket: CompileTicket) -> None:
        line = self._lines[ticket.tenant]
        line.remove(ticket)
        if not line.size:
            del self._lines[ticket.tenant]

    def _grant(self) -> None:
        """Turns to those that are first."""
        while self._free:
            first = self._first(self._clock.now())
            if first is None:
                return
            self._remove(first)
            self._free -= 1
            self._free_large -= first.size > SMALL_BYTES
            first.turn.set()

    def _first(self, now: float) -> CompileTicket | None:
        best: tuple[int, int, float] | None = None
        found: CompileTicket | None = None
        for tenant, line in self._lines.items():
            first = line.first(now, with_large=self._free_large > 0)
            if first is None:
                continue
            rank = int(self._used_by(tenant, now) / ALIKE), *first[:2]
            if best is None or rank < best:
                best, found = rank, first[2]
        return found

    def _used_by(self, tenant: str, now: float) -> float:
        seconds, then = self._used.get(tenant, (0.0, now))
        return float(seconds * 0.5 ** ((now - then) / HALF_LIFE))

    def _charge(self, tenant: str, seconds: float, now: float) -> None:
        self._used[tenant] = self._used_by(tenant, now) + seconds, now
        for other in [other for other in self._used if self._used_by(other, now) < _FORGOTTEN]:
            del self._used[other]
