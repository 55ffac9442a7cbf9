"""Queues in which keys take turns, and a few turns at once for work of about one size."""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Generic, TypeVar

import anyio
import msgspec

ItemT = TypeVar("ItemT")


class KeyTurns(Generic[ItemT]):
    """One item of each key in turn, so that an item waits for at most one of every other key."""

    def __init__(self, key: Callable[[ItemT], str]) -> None:
        self._key = key
        self._lines: OrderedDict[str, deque[ItemT]] = OrderedDict()
        """The next turn's first. No line is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ItemT]:
        """Key after key."""
        return chain.from_iterable(self._lines.values())

    def append(self, item: ItemT) -> None:
        self._lines.setdefault(self._key(item), deque()).append(item)
        self._size += 1

    def popleft(self) -> ItemT:
        """Raises IndexError: it is empty."""
        if not self._lines:
            raise IndexError("no item is left")
        key, line = next(iter(self._lines.items()))
        item = line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        return item

    def remove(self, item: ItemT) -> None:
        """Raises ValueError: it is not here."""
        key = self._key(item)
        line = self._lines.get(key, deque())
        line.remove(item)
        self._size -= 1
        if not line:
            del self._lines[key]

    def clear(self) -> None:
        self._lines.clear()
        self._size = 0


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
