"""Log lines on their way out: a bounded queue and a thread that writes, so that no request waits for a full pipe."""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

CAPACITY = 4096
"""Lines that may wait; more are dropped and counted."""
_POLL_SECONDS = 1.0
_FLUSH_POLL_SECONDS = 0.005


class LogWriter:
    """Writes lines to a descriptor. The thread is a daemon and holds no lock of Python's while it writes, so a sink
    that takes nothing holds up neither a caller nor the end of the process."""

    def __init__(self, descriptor: int, notice: Callable[[int], str], capacity: int = CAPACITY) -> None:
        """`notice` makes the line that tells how many were dropped, once there is room again."""
        self._descriptor = descriptor
        self._notice = notice
        self._capacity = capacity
        self._lines: deque[str] = deque()
        self._wake = threading.Event()
        self._writing = False
        self._closed = False
        self._untold = 0
        self.dropped = 0
        """Lines that were never written: the sink was too slow, full, or gone."""
        self._thread = threading.Thread(target=self._run, name="troupellm-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Hand over a line, without its end. Never waits."""
        if len(self._lines) >= self._capacity:
            self._drop(1)
            return
        self._lines.append(line)
        self._wake.set()

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False when that takes longer than `seconds`."""
        due = time.monotonic() + seconds
        while self._lines or self._writing:
            if time.monotonic() >= due:
                return False
            time.sleep(_FLUSH_POLL_SECONDS)
        return True

    def close(self, seconds: float) -> bool:
        """End the thread after what waits; False when the sink takes it too slowly."""
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            self._writing = True
            while self._lines:
                batch = [self._lines.popleft() for _ in range(len(self._lines))]
                untold, self._untold = self._untold, 0
                if untold:
                    batch.insert(0, self._notice(untold))
                if not self._write("".join([line + "\n" for line in batch]).encode(errors="replace")):
                    self._drop(len(batch) - bool(untold))
                    self._untold += untold
            self._writing = False
            if self._closed:
                return

    def _write(self, data: bytes) -> bool:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self._descriptor], [], _POLL_SECONDS)
            except OSError:  # a full disk, a closed pipe
                return False
        return True

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._untold += lines


class QueuedHandler(logging.Handler):
    """Formats in the caller's thread and hands the line over."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a line that cannot be formatted must not harm the request that it is about
            line = f"a log line of {record.name} could not be formatted: {type(error).__name__}"
        self.writer.put(line)
