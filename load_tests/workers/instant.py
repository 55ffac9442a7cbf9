"""A worker that answers at once: what is left of a step is the actor chain itself."""

import time
from collections.abc import Callable, Mapping

from troupellm.load_tests.workers.fake import BLOCK_SIZE, FIRST_TOKEN, FakeWorker, reply
from troupellm.protocol.messages.worker import LaunchedStep, StepPlan, StepResult

DISTINCT_TOKENS = 64
CONTEXT = 1 << 20


class Stamp:
    """Seconds on several clocks at the border of two windows."""

    def __init__(self, loop_clock: int | None, parts: Mapping[str, float]) -> None:
        self.seconds = {"total": time.perf_counter(), "thread_cpu": time.thread_time(), **parts}
        if loop_clock is not None:
            self.seconds["loop_cpu"] = time.clock_gettime(loop_clock)


class InstantWorker(FakeWorker):
    """Once `running` rows decode together it stamps every `window` steps.

    Args:
        parts: seconds by actor so far, read at every stamp.
        loop_clock: the event loop thread's CPU clock, where the system has one.
        on_full: called, on the worker's thread, when there are `stamps` stamps.
    """

    def __init__(
        self,
        running: int,
        *,
        window: int,
        stamps: int,
        parts: Mapping[str, float],
        loop_clock: int | None,
        on_full: Callable[[], None],
    ) -> None:
        self.stamps: list[Stamp] = []
        self._running = running
        self._window = window
        self._wanted = stamps
        self._parts = parts
        self._loop_clock = loop_clock
        self._on_full = on_full
        super().__init__("instant", num_blocks=running * (2 + self.max_tokens // BLOCK_SIZE), context=CONTEXT)
        self._decoding: set[int] = set()
        self._steady_steps = 0
        self._ones = (1,) * running
        self._tokens = [(FIRST_TOKEN + number,) * running for number in range(DISTINCT_TOKENS)]

    @property
    def max_tokens(self) -> int:
        """How long answers must be for the last stamp to be reached with all rows running."""
        return self._window * (self._wanted + 2) + 4 * self._running

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if len(self._decoding) == self._running and plan.counts == self._ones:
            return self._steady(plan)
        result = super().launch(plan)
        assert isinstance(result, StepResult)
        sampling = zip(plan.rows, result.token_counts, strict=True)
        self._decoding.update([row for row, count in sampling if count])
        self._decoding.difference_update(plan.freed_rows)
        return result

    def _steady(self, plan: StepPlan) -> StepResult:
        """Every row decodes: nothing to work out."""
        if self._steady_steps % self._window == 0 and len(self.stamps) < self._wanted:
            self.stamps.append(Stamp(self._loop_clock, self._parts))
            if len(self.stamps) == self._wanted:
                self._on_full()
        self._steady_steps += 1
        return reply(plan, self._ones, self._tokens[plan.step % DISTINCT_TOKENS])
