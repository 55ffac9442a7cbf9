"""Room for request bodies that are read and worked on: bounded in bytes, for all keys and for each of them.

A body takes its declared length, or the most that a body may have, before it is read, so that none stops half-way.
It gives back what it did not need once it was read, and all of it when its request has been answered. Small bodies have
a part of their own, in which they wait for no large one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from troupellm.protocol.errors import RateLimited
from troupellm.server.errors import not_ready

SMALL_BYTES: Final = 65_536
TRIMMED_BYTES: Final = 16 * 2**20
"""So much of large bodies leaves memory behind that is worth returning to the system."""
_SMALL_SHARE: Final = 0.5
"""Of the whole."""
_KEY_SHARE: Final = 0.75
"""Of either part, for one key."""


class Reservation:
    """Bytes of one body."""

    __slots__ = ("_part", "granted", "key", "num_bytes")

    def __init__(self, part: "_Part", key: str, num_bytes: int) -> None:
        self._part = part
        self.key = key
        self.num_bytes = num_bytes
        self.granted = anyio.Event()

    async def enter(self, timeout: float) -> None:
        """Wait for room.

        Args:
            timeout: seconds; 0 waits for ever.

        Raises:
            RateLimited: the key's own bodies take the room.
            HttpError: 503, the bodies of all keys take it.
        """
        if not self._part.enter(self):
            with anyio.move_on_after(timeout or None):
                await self.granted.wait()
        if self.granted.is_set():
            return
        if self._part.is_full_for(self):
            raise RateLimited("the request bodies of this key that are worked on are too large together")
        text = "the request bodies that are worked on are too large together"
        raise not_ready(text, code="server_is_overloaded", close=True)

    def leave(self) -> None:
        """Give all of it back, or wait no longer. Idempotent."""
        self._part.leave(self)
        self.num_bytes = 0

    def shrink(self, num_bytes: int) -> None:
        """Give back what is more than that."""
        if num_bytes < self.num_bytes:
            more, self.num_bytes = self.num_bytes - num_bytes, num_bytes
            self._part.give_back(self.key, more)


class BodyRoom:
    """Of one HTTP process."""

    def __init__(self, capacity: int, largest: int) -> None:
        """
        Args:
            capacity: bytes of all bodies.
            largest: bytes of one body, for which there is always room alone.
        """
        small = int(_SMALL_SHARE * capacity)
        self._small = _Part(max(small, SMALL_BYTES), SMALL_BYTES)
        self._large = _Part(max(capacity - small, largest), largest)

    @property
    def num_bytes(self) -> int:
        """Reserved now."""
        return self._small.used + self._large.used

    @property
    def num_waiting(self) -> int:
        """Bodies that are not read yet."""
        return len(self._small.waiting) + len(self._large.waiting)

    def take_trim(self) -> bool:
        """Whether many large bodies have gone and none is left; said once."""
        if self._large.used or self._large.returned < TRIMMED_BYTES:
            return False
        self._large.returned = 0
        return True

    @contextmanager
    def reserving(self, key: str, num_bytes: int) -> Iterator[Reservation]:
        """A body that may `enter`; it leaves at the end of the block.

        Args:
            key: whose body it is; "" where keys are not told apart.
            num_bytes: the most that it may have.
        """
        reservation = Reservation(self._small if num_bytes <= SMALL_BYTES else self._large, key, num_bytes)
        try:
            yield reservation
        finally:
            reservation.leave()


class _Part:
    """First come, first served, but for keys that use all that they may."""

    def __init__(self, capacity: int, largest: int) -> None:
        self.capacity = capacity
        self.per_key = max(int(_KEY_SHARE * capacity), largest)
        self.used = self.returned = 0
        self.waiting: dict[Reservation, None] = {}
        self._by_key: Counter[str] = Counter()

    def is_full_for(self, reservation: Reservation) -> bool:
        """Whether a key uses all that it may, without a reservation that it asks for."""
        key = reservation.key
        return bool(key) and self._by_key[key] + reservation.num_bytes > self.per_key

    def enter(self, reservation: Reservation) -> bool:
        """Whether there is room at once; otherwise it waits."""
        self.waiting[reservation] = None
        self._grant()
        return reservation.granted.is_set()

    def leave(self, reservation: Reservation) -> None:
        if reservation.granted.is_set():
            self.give_back(reservation.key, reservation.num_bytes)
        elif reservation in self.waiting:
            del self.waiting[reservation]
            self._grant()

    def give_back(self, key: str, num_bytes: int) -> None:
        self.used -= num_bytes
        self.returned += num_bytes
        self._by_key[key] -= num_bytes
        if not self._by_key[key]:
            del self._by_key[key]
        self._grant()

    def _grant(self) -> None:
        for reservation in list(self.waiting):
            if self.used + reservation.num_bytes > self.capacity:
                return  # later ones do not overtake, or the largest would wait for ever
            if not self.is_full_for(reservation):
                del self.waiting[reservation]
                self.used += reservation.num_bytes
                self._by_key[reservation.key] += reservation.num_bytes
                reservation.granted.set()
