"""A worker whose steps take a fixed time and no processor: what is late beside it is the engine's own doing."""

import time
from typing import Any

from troupellm.protocol.config import EngineConfig
from troupellm.protocol.worker import CacheGroup, LoadProgress, ProgressSink, StepPlan, StepResult, Ticket, WorkerReady

VOCAB = 512
TOKEN = 300
BLOCK_SIZE = 16
CONTEXT = 4096
NUM_BLOCKS = 8192


class PacedWorker:
    """Implements `protocol.worker.Worker`; steps follow each other on a clock, so they do not add up small delays."""

    def __init__(self, step_seconds: float) -> None:
        self._step = step_seconds
        self._free_at = 0.0
        self._lengths: dict[int, int] = {}

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        progress(LoadProgress(phase="weights", done=1, total=1))
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        return WorkerReady(
            vocab_width=VOCAB,
            max_model_len=CONTEXT,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture="paced",
            load_seconds=0.0,
            **zeros,
        )

    def reset(self) -> None:
        self._lengths.clear()

    def launch(self, plan: StepPlan) -> Ticket:
        self._free_at = max(self._free_at, time.perf_counter()) + self._step
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        for row in plan.retired:
            self._lengths.pop(row, None)
        for new in plan.new_rows:
            self._lengths[new.row] = len(new.token_ids) // 4
        counts = []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            samples = start + count >= self._lengths[row]
            self._lengths[row] += samples
            counts.append(int(samples))
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=tuple(counts),
            tokens=(TOKEN,) * sum(counts),
        )

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, StepResult)
        return ticket

    def close(self) -> None:
        """Holds nothing."""
