"""Metrics sink: counts what the engine reports. The exposition reads the counts when it is scraped.

Owns:      every counter and histogram of one engine (`MetricsStore`).
Receives:  MetricsMessage; senders offer and never wait, what a full inbox refuses is counted by the inbox.
Sends:     nothing.
On crash:  restarted around the same store; no task waits for it.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import Never, assert_never

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.messages.live_view import MOST_STEPS, StepView
from troupellm.protocol.messages.metrics import (
    DraftStats,
    MetricsMessage,
    RequestCancelled,
    RequestRejected,
    RequestStats,
    StepStats,
)

FORGOTTEN_STEPS = 4_096
"""Recent steps are kept no longer when so many went by without a reader."""

# vLLM's bounds, so that its dashboards read the same.
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ITERATION_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
RATIO_BOUNDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def length_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `longest` tokens."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > longest:
                return tuple(bounds)
            bounds.append(float(step * scale))
        scale *= 10


class Histogram:
    """Counts per bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | None, times: int = 1) -> None:
        """None did not happen and is not counted."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += times
            self.total += value * times


class MetricsStore:
    """The synchronous core. Survives restarts of the actor."""

    def __init__(self, max_model_len: int) -> None:
        lengths = length_bounds(max_model_len)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.batch_tokens = {"prefill": 0, "decode": 0}
        self.num_drafts = 0
        """Times that a sequence had drafts verified."""
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_at: list[int] = []
        """Accepted drafts by their position among a step's drafts; as long as the most that were ever accepted."""
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.iteration_tokens = Histogram(ITERATION_BOUNDS)
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token = Histogram(TOKEN_BOUNDS)
        self.time_per_output_token = Histogram(TOKEN_BOUNDS)
        self.request_total = Histogram(REQUEST_BOUNDS)
        self.request_queue = Histogram(REQUEST_BOUNDS)
        self.request_prefill = Histogram(REQUEST_BOUNDS)
        self.request_decode = Histogram(REQUEST_BOUNDS)
        self.request_inference = Histogram(REQUEST_BOUNDS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.request_n = Histogram(N_BOUNDS)
        self.session_cached_ratio = Histogram(RATIO_BOUNDS)
        self.recent: deque[StepView] | None = None
        """The last steps, while `recent_steps` has a reader."""
        self._unread = 0
        """Steps since it was read."""
        self.step_phases = {phase: Histogram(STEP_BOUNDS) for phase in ("prepare", "forward", "sample", "total")}

    def on_message(self, message: MetricsMessage) -> None:
        match message:
            case StepStats():
                self._on_step(message)
            case RequestStats():
                self._on_request(message)
            case RequestRejected(reason=reason):
                self.rejected[reason] += 1
            case RequestCancelled(by=by):
                self.cancelled[by] += 1
            case _:
                assert_never(message)

    def recent_steps(self) -> tuple[StepView, ...]:
        """The last steps, from the first call on. They are forgotten when no further call comes."""
        self._unread = 0
        if self.recent is None:
            self.recent = deque(maxlen=MOST_STEPS)
        return tuple(self.recent)

    def _remember(self, stats: StepStats, recent: "deque[StepView]") -> None:
        milliseconds = round(stats.seconds * 1_000, 2)
        recent.append(StepView(stats.prefill_tokens, stats.decode_tokens, stats.num_rows, milliseconds))
        self._unread += 1
        if self._unread > FORGOTTEN_STEPS:
            self.recent = None

    def _on_step(self, stats: StepStats) -> None:
        if self.recent is not None:
            self._remember(stats, self.recent)
        self.generation_tokens += stats.new_tokens
        self.preemptions += stats.preemptions
        self.prefix_queries += stats.prefix_queries
        self.prefix_hits += stats.prefix_hits
        self.batch_tokens["prefill"] += stats.prefill_tokens
        self.batch_tokens["decode"] += stats.decode_tokens
        self.iteration_tokens.observe(stats.prefill_tokens + stats.decode_tokens)
        for seconds, times in stats.inter_token_seconds:
            self.inter_token.observe(seconds, times)
        if stats.drafts is not None:
            self._on_drafts(stats.drafts)
        self.step_phases["prepare"].observe(stats.timings.prepare)
        self.step_phases["forward"].observe(stats.timings.forward)
        self.step_phases["sample"].observe(stats.timings.sample)
        self.step_phases["total"].observe(stats.seconds)

    def _on_drafts(self, drafts: DraftStats) -> None:
        self.num_drafts += drafts.rows
        self.draft_tokens += drafts.drafted
        self.accepted_tokens += drafts.accepted
        counts = self.accepted_at
        counts.extend([0] * (len(drafts.accepted_at) - len(counts)))
        for position, count in enumerate(drafts.accepted_at):
            counts[position] += count

    def _on_request(self, stats: RequestStats) -> None:
        self.finished[stats.reason] += 1
        self.prompt_tokens += stats.prompt_tokens
        self.request_prompt_tokens.observe(stats.prompt_tokens)
        self.request_generation_tokens.observe(stats.completion_tokens)
        self.request_max_tokens.observe(stats.max_tokens)
        self.request_n.observe(stats.n)
        self.session_cached_ratio.observe(stats.session_cached_ratio)
        self.first_token.observe(stats.first_token_seconds)
        self.request_total.observe(stats.total_seconds)
        self.request_queue.observe(stats.queue_seconds)
        self.request_prefill.observe(stats.prefill_seconds)
        self.request_decode.observe(stats.decode_seconds)
        if stats.prefill_seconds is not None and stats.decode_seconds is not None:
            self.request_inference.observe(stats.prefill_seconds + stats.decode_seconds)
        later_tokens = stats.completion_tokens // max(stats.n, 1) - 1
        if stats.decode_seconds is not None and later_tokens > 0:
            self.time_per_output_token.observe(stats.decode_seconds / later_tokens)


class MetricsSink:
    """The asynchronous shell."""

    def __init__(self, inbox: Mailbox[MetricsMessage, Never], store: MetricsStore) -> None:
        self._inbox = inbox
        self._store = store

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while await self._inbox.wait():
            while (message := self._inbox.take()) is not None:
                self._store.on_message(message)
            await checkpoint()
