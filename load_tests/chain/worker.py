"""A worker that answers at once: what is left of a step is the actor chain itself."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from troupellm.protocol.config import EngineConfig
from troupellm.protocol.worker import CacheGroup, LoadProgress, ProgressSink, StepPlan, StepResult, Ticket, WorkerReady

VOCAB = 512
FIRST_TOKEN = 300
DISTINCT_TOKENS = 64
BLOCK_SIZE = 16
CONTEXT = 1 << 20


class Stamp:
    """Seconds on several clocks at the border of two windows."""

    def __init__(self, loop_clock: int | None, parts: Mapping[str, float]) -> None:
        self.seconds = {"total": time.perf_counter(), "thread_cpu": time.thread_time(), **parts}
        if loop_clock is not None:
            self.seconds["loop_cpu"] = time.clock_gettime(loop_clock)


class InstantWorker:
    """Implements `protocol.worker.Worker`. Once `running` rows decode together it stamps every `window` steps.

    Args:
        parts: seconds by actor so far, read at every stamp.
        loop_clock: the event loop thread's CPU clock, where the system has one.
        on_full: called, on the worker's thread, when there are `stamps` stamps.
        pause: seconds that each step pretends to compute.
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
        pause: float = 0.0,
    ) -> None:
        self.stamps: list[Stamp] = []
        self._running = running
        self._window = window
        self._wanted = stamps
        self._parts = parts
        self._loop_clock = loop_clock
        self._on_full = on_full
        self._pause = pause
        self._prompts: dict[int, int] = {}
        self._decoding: set[int] = set()
        self._steady_steps = 0
        self._ones = (1,) * running
        self._tokens = [(FIRST_TOKEN + number,) * running for number in range(DISTINCT_TOKENS)]

    @property
    def max_tokens(self) -> int:
        """How long answers must be for the last stamp to be reached with all rows running."""
        return self._window * (self._wanted + 2) + 4 * self._running

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        progress(LoadProgress(phase="weights", done=1, total=1))
        blocks = self._running * (2 + self.max_tokens // BLOCK_SIZE)
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        return WorkerReady(
            vocab_width=VOCAB,
            max_model_len=CONTEXT,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture="instant",
            load_seconds=0.0,
            **zeros,
        )

    def launch(self, plan: StepPlan) -> Ticket:
        if self._pause:
            time.sleep(self._pause)
        if len(self._decoding) == self._running and plan.counts == self._ones:
            return self._steady(plan)
        for new in plan.new_rows:
            self._prompts[new.row] = len(new.token_ids) // 4
        counts = []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            samples = start + count >= self._prompts[row]
            counts.append(int(samples))
            if samples:
                self._decoding.add(row)
        self._decoding.difference_update(plan.retired)
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=tuple(counts),
            tokens=(FIRST_TOKEN,) * sum(counts),
        )

    def _steady(self, plan: StepPlan) -> StepResult:
        """Every row decodes: nothing to work out."""
        if self._steady_steps % self._window == 0 and len(self.stamps) < self._wanted:
            self.stamps.append(Stamp(self._loop_clock, self._parts))
            if len(self.stamps) == self._wanted:
                self._on_full()
        self._steady_steps += 1
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=self._ones,
            tokens=self._tokens[plan.step % DISTINCT_TOKENS],
        )

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, StepResult)
        return ticket

    def reset(self) -> None:
        raise NotImplementedError("no step of the benchmark fails")

    def close(self) -> None:
        """Holds nothing."""
