"""Runs a worker's launch/collect pairs in order. A plan is launched as it comes, also while an earlier one runs.

A worker process and a worker inside the engine's process are both run through `Steps`. With a GPU, waiting happens on a
second thread, `Waits`, so that the worker's thread is free to launch the next plan. With a CPU, `collect` computes and
there is no waiting.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from troupellm.protocol.messages.worker import LaunchedStep, StepPlan, StepResult, Worker
from troupellm.protocol.messages.worker_abilities import Wait, WorksAhead


class Steps:
    """The plans that a worker has. All calls come from the worker's thread.

    Attributes:
        due: results that can be collected, oldest first; `collect` may have to compute them.
    """

    def __init__(self, worker: Worker, wait: Callable[[Wait], None]) -> None:
        """wait: runs the function that it is given elsewhere, in order, and then calls `landed` on this thread."""
        self._worker, self._wait = worker, wait
        self._ahead: WorksAhead = worker if isinstance(worker, WorksAhead) else _NothingAhead()
        self._launched: deque[LaunchedStep] = deque()
        self._waits = 0
        self._completes = False
        """The next `landed` completes the oldest step: by then its rows' last tokens have been reported."""
        self.due = 0

    @property
    def busy(self) -> bool:
        """True if a result is still to be collected."""
        return bool(self._launched)

    @property
    def _followed(self) -> int:
        """The number of launched steps, oldest first, that are due or being waited for."""
        return self.due + self._waits

    def launch(self, plan: StepPlan) -> None:
        """Begin with a plan. Its result is due now, or once `landed` was called for it."""
        self._launched.append(self._worker.launch(plan))
        self._follow(at_once=True)

    def landed(self) -> None:
        """The oldest wait is over."""
        if not self._completes:
            self._waits -= 1
            self.due += 1
            return
        self._completes = False
        if self._launched:
            self._ahead.complete(self._launched[0])
            self._follow(at_once=False)

    def collect(self) -> StepResult:
        """The oldest result, which is due."""
        self.due -= 1
        result = self._worker.collect(self._launched.popleft())
        self._follow(at_once=False)
        return result

    def _follow(self, *, at_once: bool) -> None:
        """Start the waits that are outstanding. at_once: a step that is done becomes due now, without a wait."""
        while self._followed < len(self._launched):
            ticket = self._launched[self._followed]
            if self._ahead.incomplete(ticket):
                if not self._followed and not self._completes:
                    self._completes = True
                    self._wait(_no_wait)
                return
            wait = self._ahead.under_way(ticket)
            if wait is None and not self._waits and at_once:
                self.due += 1
            else:  # a step that is done queues behind those that are not
                self._waits += 1
                self._wait(wait or _no_wait)


class Waits:
    """The one thread that waits for a device. The first wait starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Wait, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, wait: Wait, over: Callable[[], None]) -> None:
        """Call `wait` after all earlier ones, then `over`, which must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((wait, over))

    def end(self) -> None:
        """Wait for all added calls, then end the thread. Nothing may be added afterwards."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (added := self._queue.get()) is not None:
            wait, over = added
            with suppress(Exception):  # the device is broken: `collect` fails too, and reports it
                wait()
            over()
            del added, wait, over  # an idle thread keeps nothing alive


class _NothingAhead:
    """The interface of a worker that computes only when its results are collected."""

    def under_way(self, _: LaunchedStep) -> Wait | None:
        return None

    def incomplete(self, _: LaunchedStep) -> bool:
        return False

    def complete(self, _: LaunchedStep) -> None:
        """Nothing is left to do."""


def _no_wait() -> None:
    """Nothing to wait for."""
