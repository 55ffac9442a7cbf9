"""A worker that computes nothing: for benchmarks of what the engine itself costs."""

from typing import Any

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import (
    CacheGroup,
    LaunchedStep,
    LoadProgress,
    ProgressSink,
    StepPlan,
    StepResult,
    WorkerReady,
)

VOCAB = 512
FIRST_TOKEN = 300
BLOCK_SIZE = 16


class FakeWorker:
    """Implements `protocol.worker.Worker`. Every row says `FIRST_TOKEN` in each step from the end of its prompt on."""

    def __init__(self, architecture: str, *, num_blocks: int, context: int) -> None:
        self._architecture = architecture
        self._num_blocks = num_blocks
        self._context = context
        self._prompts: dict[int, int] = {}
        """Known tokens of the rows that have not computed all of them, as of their start."""

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        progress(LoadProgress(phase="weights", done=1, total=1))
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        return WorkerReady(
            vocab_width=VOCAB,
            max_model_len=self._context,
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture=self._architecture,
            load_seconds=0.0,
            **zeros,
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for row in plan.freed_rows:
            self._prompts.pop(row, None)
        for new in plan.new_rows:
            self._prompts[new.row] = len(new.token_ids) // 4
        if not self._prompts:
            counts: tuple[int, ...] = (1,) * len(plan.rows)
        else:
            counts = tuple([self._samples(*row) for row in zip(plan.rows, plan.starts, plan.counts, strict=True)])
        return reply(plan, counts, (FIRST_TOKEN,) * sum(counts))

    def _samples(self, row: int, start: int, count: int) -> int:
        if start + count < self._prompts.get(row, 0):
            return 0
        self._prompts.pop(row, None)
        return 1

    def collect(self, ticket: LaunchedStep) -> StepResult:
        assert isinstance(ticket, StepResult)
        return ticket

    def reset(self) -> None:
        self._prompts.clear()

    def close(self) -> None:
        """Holds nothing."""


def reply(plan: StepPlan, counts: tuple[int, ...], tokens: tuple[int, ...]) -> StepResult:
    return StepResult(
        step=plan.step,
        engine_epoch=plan.engine_epoch,
        rows=plan.rows,
        epochs=plan.epochs,
        token_counts=counts,
        tokens=tokens,
    )
