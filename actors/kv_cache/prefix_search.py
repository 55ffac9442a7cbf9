"""The longest prefix that the cache holds for all groups together."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from troupellm.actors.kv_cache.block_pool import BlockPool, in_group
from troupellm.protocol.messages.worker import NULL_BLOCK

IN_HOST: Final = -2
"""Stands for a block that host memory has and the device has not."""


class Finder(Protocol):
    def find(self, key: bytes, group: int = 0) -> int | None:
        """The block that holds what `key` names."""

    def find_all(self, keys: Sequence[bytes], group: int = 0) -> list[int]:
        """The blocks of the first keys, as far as there are any without a gap."""


class WithHost:
    """A `Finder` on the device first, then in host memory."""

    def __init__(self, pool: BlockPool, in_host: Callable[[bytes], object | None]) -> None:
        """in_host: what host memory has under a key, its group included; None is nothing."""
        self._pool = pool
        self._in_host = in_host

    def find(self, key: bytes, group: int = 0) -> int | None:
        block = self._pool.find(key, group)
        return IN_HOST if block is None and self._in_host(in_group(key, group)) is not None else block

    def find_all(self, keys: Sequence[bytes], group: int = 0) -> list[int]:
        found = self._pool.find_all(keys, group)
        for key in keys[len(found) :]:
            block = self.find(key, group)
            if block is None:
                break
            found.append(block)
        return found


def find_prefix(pool: Finder, keys: Sequence[bytes], windows: Sequence[int | None], block_size: int) -> list[list[int]]:
    """Blocks per group, equally many, NULL_BLOCK where the token behind the prefix sees nothing of one.

    A group that keeps everything needs every block of the prefix. A group with a window needs those that the first
    token behind the prefix sees, so its longest prefix is looked for from the end: one missing block rules out all
    prefixes that end less than a window behind it. Groups are asked in turns until they agree.

    Args:
        keys: of the blocks that may be found, first block first.
        windows: per group; None keeps everything.
    """
    if len(windows) == 1 and windows[0] is None:
        return [pool.find_all(keys)]
    count = len(keys)
    whole: dict[int, list[int]] = {}
    for group, window in enumerate(windows):
        if window is None:
            whole[group] = pool.find_all(keys[:count], group)
            count = len(whole[group])
    parts = {group: _Part(pool, keys, group, window, block_size) for group, window in enumerate(windows) if window}
    agreed = False
    while not agreed:
        before = count
        for part in parts.values():
            count = part.longest(count)
        agreed = count == before
    return [parts[group].blocks(count) if group in parts else whole[group][:count] for group in range(len(windows))]


class _Part:
    """The blocks of a prefix that one group with a window has; every key is looked up at most once."""

    def __init__(self, pool: Finder, keys: Sequence[bytes], group: int, window: int, block_size: int) -> None:
        self._pool, self._keys, self._group, self._window, self._size = pool, keys, group, window, block_size
        self._found: dict[int, int | None] = {}

    def longest(self, most: int) -> int:
        """Blocks of the longest prefix of at most `most` that this group allows."""
        index = most - 1
        while index >= self._first(most):
            if index not in self._found:
                self._found[index] = self._pool.find(self._keys[index], self._group)
            if self._found[index] is None:
                most = index
            index -= 1
        return most

    def blocks(self, count: int) -> list[int]:
        """Those of a prefix that `longest` gave."""
        first = self._first(count)
        seen = [block for index in range(first, count) if (block := self._found[index]) is not None]
        return [NULL_BLOCK] * first + seen

    def _first(self, count: int) -> int:
        """The first block that the token behind so many blocks sees."""
        return max(0, count * self._size + 1 - self._window) // self._size


def first_seen(tables: list[list[int]]) -> int:
    """The first block of a prefix that any group looks at: what is before it needs to be nowhere."""
    return min(next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table)) for table in tables)


def unseen_left_out(found: list[int], window: int | None, start: int, block_size: int) -> list[int]:
    """The blocks of a prefix, without those that are not read by computing from `start` on."""
    if window is None:
        return found
    first = min(max(0, start + 1 - window) // block_size, len(found))
    return [NULL_BLOCK] * first + found[first:]
