"""Progress of a download, over all of its files."""

import time

from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

_SECONDS = 0.2
"""Between two reports of one file; every report may cross threads and processes."""


class Meter:
    """Adds up the bytes of the files that are downloaded; bytes of an earlier, killed download count as done."""

    def __init__(self, progress: ProgressSink) -> None:
        self._progress = progress
        self._total = 0
        self._others = 0
        """Bytes of the files before the current one, and of partial files behind it."""
        self._current, self._next = 0, 0.0

    def expect(self, total: int, here: int) -> None:
        """More files are about to be downloaded.

        Args:
            total: their bytes.
            here: bytes of them that an earlier download left.
        """
        self._total += total
        self._others += here

    def begin(self, earlier: int) -> None:
        """The next file begins; `earlier` bytes of it are here."""
        self._others += self._current - earlier
        self._current, self._next = earlier, 0.0

    def report(self, name: str, current: int, *, whole: bool = False) -> None:
        """Report the bytes of the current file; most reports in between are left out."""
        self._current = current
        now = time.monotonic()
        if whole or now >= self._next:
            self._next = now + _SECONDS
            done = max(0, self._others + current)
            self._progress(LoadProgress(phase="download", done=done, total=max(self._total, done), detail=name))
