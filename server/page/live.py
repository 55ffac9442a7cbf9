"""Frames of the engine's picture for the viewers of the page.

All viewers share one frame. The viewer that waits first makes the next one, so that nothing is computed without
viewers, and no task outlives them. A slow viewer skips the frames that it has no room for.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

from troupellm.server.base.errors import HttpError

FRAME_SECONDS = 0.25
MOST_VIEWERS = 64


class LiveFrames:
    """Of one HTTP process."""

    def __init__(self, read: Callable[[], Awaitable[bytes]], interval: float = FRAME_SECONDS) -> None:
        """
        Args:
            read: gives the picture as JSON.
            interval: seconds between frames.
        """
        self._read = read
        self._interval = interval
        self.viewers = 0
        self.number = 0
        """Frames that were made."""
        self._frame = b""
        self._made_at = -interval
        self._making = False
        self._changed = anyio.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a viewer.

        Raises:
            HttpError: 503, there are as many viewers as may be.
        """
        if self.viewers >= MOST_VIEWERS:
            message = f"the page has {MOST_VIEWERS} viewers: close one of them"
            raise HttpError(503, message, code="too_many_viewers", retry=True)
        if not self.viewers:
            self._frame = b""  # an old one shows what was
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1

    async def next(self, seen: int) -> tuple[int, bytes]:
        """The newest frame and its number, once it is another one than number `seen`.

        Raises:
            TroupeError: the engine gives no picture.
        """
        while self.number == seen or not self._frame:
            if self._making:
                await self._changed.wait()
            else:
                await self._make()
        return self.number, self._frame

    async def _make(self) -> None:
        """A viewer that leaves meanwhile hands the work to another one."""
        self._making = True
        try:
            await anyio.sleep(max(0.0, self._made_at + self._interval - time.monotonic()))
            self._frame = b"data: " + await self._read() + b"\n\n"
            self._made_at = time.monotonic()
            self.number += 1
        finally:
            self._making = False
            self._changed.set()
            self._changed = anyio.Event()
