"""A bounded queue of log lines and the thread that writes them, so that no request waits for a full pipe."""

import logging
import os
import select
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

CAPACITY = 4096
"""Lines that may wait; further lines are dropped and counted."""
_MOST_TOGETHER = 256
"""Lines of one write."""
_POLL_SECONDS = 1.0


class LogWriter(QueueListener):
    """Writes lines to a descriptor. The thread is a daemon and holds no lock while it writes, so a sink that takes
    nothing delays neither a caller nor the end of the process. The queue may be entered again by a finalizer that logs.
    """

    queue: SimpleQueue[Any]
    """Lines without their end, and the events of `flush`."""

    def __init__(self, descriptor: int, notice: Callable[[int], str], capacity: int = CAPACITY) -> None:
        """`notice` makes the line that tells the number of dropped lines, once there is room again."""
        super().__init__(SimpleQueue())
        self._descriptor = descriptor
        self._notice = notice
        self._capacity = capacity
        self._batch: list[str] = []
        self._untold = 0
        self.dropped = 0
        """Lines that were never written: the sink was too slow, full, or gone."""
        self.start()

    def put(self, line: str) -> None:
        """Never waits."""
        if self.queue.qsize() < self._capacity:
            self.queue.put(line)
        else:
            self._drop(1)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False when that takes longer than `seconds`."""
        written = threading.Event()
        self.queue.put(written)
        return written.wait(seconds)

    def handle(self, record: Any) -> None:
        """The thread calls it for each entry of the queue."""
        if isinstance(record, str):
            self._batch.append(record)
            if self.queue.empty() or len(self._batch) >= _MOST_TOGETHER:
                self._write_batch()
        else:
            self._write_batch()
            record.set()

    def _write_batch(self) -> None:
        batch, self._batch = self._batch, []
        untold, self._untold = self._untold, 0
        lines = [self._notice(untold), *batch] if untold else batch
        if lines and not self._write("".join([line + "\n" for line in lines]).encode(errors="replace")):
            self._drop(len(batch))
            self._untold += untold

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


class QueuedHandler(QueueHandler):
    """Formats in the caller's thread and hands the line over."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer.queue)
        self.writer = writer

    def prepare(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except Exception as error:  # a line that cannot be formatted must not harm the request that it is about
            return f"a log line of {record.name} could not be formatted: {type(error).__name__}"

    def enqueue(self, record: Any) -> None:
        self.writer.put(record)
