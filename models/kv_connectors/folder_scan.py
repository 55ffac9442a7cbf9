"""Scans a folder of very many files, a little at a time: measures its size, and removes the oldest files."""

import heapq
import os
from collections.abc import Iterator
from time import monotonic
from typing import Final, NamedTuple

MOST_LEAVING: Final = 65_536
"""Most files that one scan removes, and so most names that it remembers."""
_KEPT: Final = 0.9
"""Share of the limit that is kept after an eviction."""


class File(NamedTuple):
    used: float
    size: int
    path: str


class FolderScan:
    """One scan of the folder.

    Attributes:
        count, total: files that were seen and are still there, and their bytes.
        evicted: files that gave way.
    """

    def __init__(self, files: Iterator[File], limit: int) -> None:
        """limit: bytes; of more than that the files that were used longest ago give way."""
        self._files, self._limit = files, limit
        self._oldest: list[tuple[float, int, str]] = []
        """A heap, the one that was used last first."""
        self._leaving: list[File] | None = None
        """Once all was seen: the one that was used longest ago last."""
        self.count = self.total = self.evicted = 0

    @property
    def too_much(self) -> bool:
        """More lies there than may."""
        return self.total > self._limit

    def go_on(self, deadline: float) -> bool:
        """Scan until the end or the deadline; handles at least one file. Returns True at the end.

        Raises:
            OSError: a file or folder cannot be read or removed.
        """
        for file in self._files:
            self._see(file)
            if monotonic() > deadline:
                return False
        if self._leaving is None:
            self._leaving = [File(-used, size, path) for used, size, path in sorted(self._oldest)]
            if not self.too_much:
                self._leaving.clear()
        while self._leaving and self.total > self._limit * _KEPT:
            self._remove(self._leaving.pop())
            if monotonic() > deadline:
                return False
        return True

    def _see(self, file: File) -> None:
        self.count += 1
        self.total += file.size
        entry = (-file.used, file.size, file.path)
        if len(self._oldest) < MOST_LEAVING:
            heapq.heappush(self._oldest, entry)
        else:
            heapq.heappushpop(self._oldest, entry)

    def _remove(self, file: File) -> None:
        try:
            os.unlink(file.path)
            self.evicted += 1
        except FileNotFoundError:  # others remove the same ones
            pass
        self.count -= 1
        self.total -= file.size
