"""Room for request bodies that are read and worked on: bounded in bytes, for all keys and for each of them.

A body takes room as its bytes arrive, so that a client that declares much and sends nothing takes none. Each part of
the room has one slot beside the shared bytes: the first body in line that finds no shared bytes takes the slot, which
is as large as the largest body. So one body can always be read to its end, and bodies that are half read do not block
each other for ever. A large body takes room for its decoded values too before it is decoded: a list of token ids is
many times as large as its text. A body gives back its bytes when its request ends, and most of them once its prompt is
made. Small bodies have a part of their own, in which they wait for no large one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from troupellm.protocol.errors import RateLimited
from troupellm.server.base.errors import HttpError, not_ready

SMALL_BYTES: Final = 65_536
TRIMMED_BYTES: Final = 16 * 2**20
"""So much of large bodies leaves memory behind that is worth returning to the system."""
_SMALL_SHARE: Final = 0.5
"""Of the whole."""
_KEY_SHARE: Final = 0.75
"""Of either part, for one key, as far as that leaves shared bytes for another key's largest body."""
_STEP_BYTES: Final = 16_384
"""A body that grows takes so much at once."""


class Reservation:
    """Bytes of one body."""

    def __init__(self, part: "_Part", key: str, most: int, beyond: "_Part | None" = None) -> None:
        """
        Args:
            key: whose body it is; "" where keys are not told apart.
            most: bytes that the body may have.
            beyond: the part that takes bytes which are added to a body that is too small for it.
        """
        self.key = key
        self.num_bytes = 0
        """Reserved now, without those of `add`."""
        self.wanted = 0
        """Bytes that it waits for, those that it has included."""
        self.granted = anyio.Event()
        self._part = part
        self._most = most
        self._beyond = beyond
        self._added: Reservation | None = None
        self._waited = 0.0

    async def enter(self, timeout: float) -> None:
        """Take room for the largest that the body can be; see `take`."""
        await self.take(self._most, timeout)

    async def grow(self, num_bytes: int, timeout: float) -> None:
        """Take room for so many bytes, and for a few that follow them; see `take`."""
        if num_bytes > self.num_bytes:
            steps = -(-num_bytes // _STEP_BYTES)
            await self.take(max(num_bytes, min(steps * _STEP_BYTES, self._most)), timeout)

    async def take(self, num_bytes: int, timeout: float) -> None:
        """Wait until it has at least so many bytes.

        Args:
            timeout: seconds, for all waits of the body together; 0 waits for ever.

        Raises:
            RateLimited: the key's own bodies take the room.
            HttpError: 503, the bodies of all keys take it.
        """
        if num_bytes <= self.num_bytes or self._part.enter(self, num_bytes):
            return
        began = anyio.current_time()
        with anyio.move_on_after(max(timeout - self._waited, 0.0) if timeout else None):
            await self.granted.wait()
        self._waited += anyio.current_time() - began
        if self.granted.is_set():
            return
        full = self._part.is_full_for(self)
        self._part.forget(self)
        if full:
            raise RateLimited("the request bodies of this key that are worked on are too large together")
        raise no_room()

    async def add(self, num_bytes: int, timeout: float) -> None:
        """Wait for room for so many bytes more, of a conversation that the request continues; see `take`."""
        if self._beyond is None:
            await self.take(self.num_bytes + num_bytes, timeout)
            return
        if self._added is None:
            self._added = Reservation(self._beyond, self.key, num_bytes)
        await self._added.add(num_bytes, timeout)

    def take_now(self, num_bytes: int) -> bool:
        """Take so many of the shared bytes, if they are free and no other body waits for them."""
        return self._part.take_now(self, num_bytes)

    def leave(self) -> None:
        """Give all of it back, or wait no longer. Idempotent."""
        if self._added is not None:
            self._added.leave()
        self._part.leave(self)

    def shrink(self, num_bytes: int) -> None:
        """Give back the bytes beyond that, which the body did not have."""
        self._part.shrink(self, num_bytes)

    def release(self, num_bytes: int) -> None:
        """Give back so many bytes, which are not in memory any more, or which other limits bound from now on."""
        if self._added is not None:
            rest = max(num_bytes - self._added.num_bytes, 0)
            self._added.release(num_bytes)
            num_bytes = rest
        self._part.release(self, num_bytes)


def no_room() -> HttpError:
    text = "the request bodies that are worked on are too large together"
    return not_ready(text, code="server_is_overloaded", close=True)


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
        """Bodies that wait for room."""
        return len(self._small.waiting) + len(self._large.waiting)

    def take_trim(self) -> bool:
        """Whether many large bodies have gone and none is left; said once."""
        if self._large.used or self._large.returned < TRIMMED_BYTES:
            return False
        self._large.returned = 0
        return True

    def reservation(self, key: str, most: int) -> Reservation:
        """A body that has no room yet; its owner calls `leave` at the end. Arguments are those of `Reservation`."""
        if most > SMALL_BYTES:
            return Reservation(self._large, key, most)
        return Reservation(self._small, key, most, self._large)

    @contextmanager
    def reserving(self, key: str, most: int) -> Iterator[Reservation]:
        """A body that has no room yet; it leaves at the end of the block. Arguments are those of `Reservation`."""
        reservation = self.reservation(key, most)
        try:
            yield reservation
        finally:
            reservation.leave()


class _Part:
    """First come, first served, but for keys that use all that they may."""

    def __init__(self, capacity: int, largest: int) -> None:
        self.shared = capacity - largest
        self.per_key = max(min(int(_KEY_SHARE * capacity), self.shared - largest), largest)
        self.used = self.returned = 0
        self.waiting: dict[Reservation, None] = {}
        self._slot: Reservation | None = None
        """The body that may grow to the largest size; its bytes are no shared ones."""
        self._by_key: Counter[str] = Counter()

    def is_full_for(self, reservation: Reservation) -> bool:
        """Whether a key uses all that it may, without the bytes that a reservation waits for."""
        key, more = reservation.key, reservation.wanted - reservation.num_bytes
        has_others = self._by_key[key] > reservation.num_bytes
        return bool(key) and has_others and self._by_key[key] + more > self.per_key

    def enter(self, reservation: Reservation, wanted: int) -> bool:
        """Whether there is room at once; otherwise it waits."""
        reservation.wanted, reservation.granted = wanted, anyio.Event()
        self.waiting[reservation] = None
        if reservation is self._slot:
            self._accept(reservation)
        else:
            self._grant()
        return reservation.granted.is_set()

    def take_now(self, reservation: Reservation, wanted: int) -> bool:
        reservation.wanted = wanted
        if self.waiting or not self._has_shared(reservation) or self.is_full_for(reservation):
            return False
        self._resize(reservation, wanted)
        return True

    def forget(self, reservation: Reservation) -> None:
        """It waits no longer."""
        if reservation in self.waiting:
            del self.waiting[reservation]
            self._grant()

    def leave(self, reservation: Reservation) -> None:
        self.waiting.pop(reservation, None)
        self.returned += reservation.num_bytes
        self._resize(reservation, 0)
        self._grant()

    def shrink(self, reservation: Reservation, num_bytes: int) -> None:
        self._resize(reservation, min(num_bytes, reservation.num_bytes))
        self._grant()

    def release(self, reservation: Reservation, num_bytes: int) -> None:
        num_bytes = min(num_bytes, reservation.num_bytes)
        self.returned += num_bytes
        self.shrink(reservation, reservation.num_bytes - num_bytes)

    def _resize(self, reservation: Reservation, num_bytes: int) -> None:
        more = num_bytes - reservation.num_bytes
        reservation.num_bytes = num_bytes
        self.used += more
        self._by_key[reservation.key] += more
        if not self._by_key[reservation.key]:
            del self._by_key[reservation.key]
        if reservation is self._slot and more < 0 and self.used <= self.shared:
            self._slot = None  # its bytes are shared ones from now on, and the next body may have the slot

    def _has_shared(self, reservation: Reservation) -> bool:
        slot = 0 if self._slot is None else self._slot.num_bytes
        return self.used - slot + reservation.wanted - reservation.num_bytes <= self.shared

    def _grant(self) -> None:
        """Grant what can be granted in order. Later bodies overtake those of a key that uses all that it may, and no
        others, or the largest would wait for ever."""
        for reservation in list(self.waiting):
            if self.is_full_for(reservation):
                continue
            if not self._has_shared(reservation):
                if self._slot is not None:
                    return
                self._slot = reservation
            self._accept(reservation)
        half_read = next((one for one in self.waiting if one.num_bytes), None)
        if self._slot is None and half_read is not None:  # or the bodies of a key would wait for each other
            self._slot = half_read
            self._accept(half_read)

    def _accept(self, reservation: Reservation) -> None:
        del self.waiting[reservation]
        self._resize(reservation, reservation.wanted)
        reservation.granted.set()
