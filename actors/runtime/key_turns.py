"""A queue in which keys take turns, and each key's own items stay in order."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

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
