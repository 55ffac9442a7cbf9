"""Limits of HTTP/2's frames: frames without content (resets, pings, settings, windows, empty data) are counted
before they are handled, and a client that sends too many of them is disconnected with a reason."""

from collections.abc import Callable

import h2.exceptions
from h2.frame_buffer import FrameBuffer
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, StreamBuffer
from hypercorn.typing import Event
from hyperframe.frame import DataFrame, Frame, HeadersFrame, WindowUpdateFrame

BURST = 1_000
"""Frames without use that may come at once ..."""
PER_SECOND = 100
"""... and after that."""
LEAST_CHUNK = 32
"""Bytes of a body that are worth a frame ..."""
WORTH_SENDING = 1_024
"""... and those of an answer, unless there is no more of it; so much is also worth taking for a stream that is over."""


class Frames(FrameBuffer):
    """Of one connection."""

    def __init__(self, clock: Callable[[], float], is_open: Callable[[int], bool]) -> None:
        """
        Args:
            clock: seconds.
            is_open: whether a stream of that number can still take data.
        """
        super().__init__(server=True)
        self._clock = clock
        self._is_open = is_open
        self._allowance = float(BURST)
        self._counted = clock()
        self._windows = 0

    def __next__(self) -> Frame:
        """
        Raises:
            DenialOfServiceError: see `spend`.
        """
        frame = super().__next__()
        if not self._has_use(frame):
            self.spend()
        return frame

    def spend(self) -> None:
        """Count something that cost work and brought nothing.

        Raises:
            DenialOfServiceError: too much of it.
        """
        now = self._clock()
        self._allowance = min(BURST, self._allowance + (now - self._counted) * PER_SECOND)
        self._counted = now
        self._allowance -= 1
        if self._allowance < 0:
            raise h2.exceptions.DenialOfServiceError("too many frames without use")

    def sent(self, size: int, *, all_there_was: bool) -> None:
        """Data went out: its reader may widen a window for it, the stream's and the connection's. Not where it had
        opened the window by a crack only, to be sent an answer byte by byte."""
        if all_there_was or size >= WORTH_SENDING:
            self._windows += 2

    def _has_use(self, frame: Frame) -> bool:
        if isinstance(frame, HeadersFrame):
            self._windows += 1
            return True
        if isinstance(frame, WindowUpdateFrame):
            expected = self._windows > 0
            self._windows -= expected
            return expected
        if isinstance(frame, DataFrame):
            wanted = len(frame.data) >= LEAST_CHUNK or "END_STREAM" in frame.flags
            return len(frame.data) >= WORTH_SENDING or (wanted and self._is_open(frame.stream_id))
        return False


class Unsent(StreamBuffer):  # type: ignore[misc]
    """The part of an answer for which the reader has no window yet. hypercorn's own buffer grows without a bound."""

    def __init__(self, event_class: type[Event], frames: Frames) -> None:
        super().__init__(event_class)
        self._frames = frames

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        if data:
            self._frames.sent(len(data), all_there_was=not self.buffer)
        return data
