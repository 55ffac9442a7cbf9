"""Steps under way: a plan is launched when it comes, also while another one is waited for, and collected in its turn.

Whoever drives a worker does it by `Steps`. A device that computes by itself is waited for on a thread of its own,
`Waits`, which leaves the worker's thread free for the next plan. Where `collect` computes, nothing is waited for.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from troupellm.protocol.worker import StepPlan, StepResult, Ticket, Worker
from troupellm.protocol.worker_abilities import Wait, WorksAhead


class Steps:
    """The plans that a worker has. All calls come from the worker's thread.

    Attributes:
        due: results that can be collected, oldest first; `collect` may have to compute them.
    """

    def __init__(self, worker: Worker, wait: Callable[[Wait], None]) -> None:
        """wait: has what it is given called elsewhere, in order, and `landed` called here after each of them."""
        self._worker, self._wait = worker, wait
        self._ahead: WorksAhead = worker if isinstance(worker, WorksAhead) else _NothingAhead()
        self._launched: deque[Ticket] = deque()
        self._waits = 0
        self._completes = False
        """What lands next is the moment to complete the oldest one: its rows' last tokens are told by then."""
        self.due = 0

    @property
    def busy(self) -> bool:
        """Whether a result is still to be collected."""
        return bool(self._launched)

    @property
    def _followed(self) -> int:
        """Of those launched, oldest first: how many are due, or waited for."""
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
        """Have those waited for that nobody waits for yet. at_once: one that is done is due now, and looked for."""
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
            else:  # one that is done stays in line behind those that are not
                self._waits += 1
                self._wait(wait or _no_wait)


class Waits:
    """The one thread on which a device is waited for. The first wait starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Wait, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, wait: Wait, over: Callable[[], None]) -> None:
        """Have `wait` called after those that were added before, then `over`, which may not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((wait, over))

    def end(self) -> None:
        """Wait for all that was added; the thread is gone then. Nothing is added any more."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (added := self._queue.get()) is not None:
            wait, over = added
            with suppress(Exception):  # of a device that is broken: `collect` meets it too, and tells
                wait()
            over()
            del added, wait, over  # an idle thread keeps nothing alive


class _NothingAhead:
    """Of a worker that computes when it is asked for results."""

    def under_way(self, _: Ticket) -> Wait | None:
        return None

    def incomplete(self, _: Ticket) -> bool:
        return False

    def complete(self, _: Ticket) -> None:
        """There is nothing left to do."""


def _no_wait() -> None:
    """There is nothing to wait for."""
