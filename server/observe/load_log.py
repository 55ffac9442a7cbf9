"""The log of a model's loading: its notes, and the download as a bar or as one line per ten seconds."""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from troupellm.protocol.config.sizes import human_size
from troupellm.protocol.messages.worker import LoadProgress

logger = logging.getLogger("troupellm.server")

SECONDS = 10.0
"""Between two lines about a download."""


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread of its own


class LoadLog:
    """The progress sink of a process that loads a model."""

    def __init__(self, terminal: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            terminal: where a bar is drawn; None: the log gets lines instead.
            now: seconds of a clock that never goes back.
        """
        self._terminal, self._now = terminal, now
        self._bar: _Bar | None = None
        self._began, self._next = 0.0, 0.0
        self._first: LoadProgress | None = None
        self._last: LoadProgress | None = None

    def report(self, progress: LoadProgress) -> None:
        """Tell of it; the detail of a download is the file, of other phases it is notes, a line each."""
        if progress.phase == "download":
            self._download(progress)
            return
        self.close()
        for line in progress.detail.splitlines():
            logger.info("%s", line)

    def close(self) -> None:
        """The download is over, or has failed."""
        first, last, bar = self._first, self._last, self._bar
        self._first = self._last = self._bar = None
        if bar is not None:
            bar.close()
        if first is not None and last is not None and last.done > first.done:
            logger.info("downloaded %s in %s", human_size(last.done - first.done), _duration(self._now() - self._began))

    def _download(self, progress: LoadProgress) -> None:
        now = self._now()
        if self._first is None:
            self._first, self._began, self._next = progress, now, now + SECONDS
            if self._terminal is not None:
                self._bar = _Bar(
                    desc=progress.detail,
                    initial=progress.done,
                    total=progress.total,
                    unit="B",
                    unit_scale=True,
                    file=self._terminal,
                    dynamic_ncols=True,
                )
        self._last = progress
        if self._bar is not None:
            self._bar.total = progress.total
            self._bar.set_description_str(progress.detail, refresh=False)
            self._bar.update(progress.done - self._bar.n)
        elif now >= self._next:
            self._next = now + SECONDS
            logger.info("%s", _line(progress, progress.done - self._first.done, now - self._began))


def terminal() -> TextIO | None:
    """Where a person watches this process; None: its errors go to a file or another program."""
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


def _line(progress: LoadProgress, transferred: int, seconds: float) -> str:
    """One line, such as `download: 1.2 GB of 4.7 GB, 35.1 MB/s, 1 min 40 s left (model.safetensors)`."""
    rate = transferred / seconds if seconds > 0 else 0.0
    left = f"{_duration((progress.total - progress.done) / rate)} left" if rate > 0 else "time left unknown"
    return (
        f"download: {human_size(progress.done)} of {human_size(progress.total)}, {human_size(int(rate))}/s, {left} "
        f"({progress.detail})"
    )


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
