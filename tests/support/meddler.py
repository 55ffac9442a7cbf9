"""A real worker that fails when it is told to, for the rows about workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import ProgressSink, StepPlan, StepResult, WorkerReady

MARKER = [11, 7, 11, 7, 11]
"""A prompt that begins so is the attacker's."""
_MARK = b"".join(token.to_bytes(4, "little") for token in MARKER)


class Meddler(ModelWorker):
    """`on_launch` hears of every plan and may raise; `on_result` may change its result; `marked` are attackers'."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_result: Callable[[StepResult], StepResult] = lambda result: result
        self.marked: set[int] = set()
        self.resets = 0

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        ready = super().load(config, progress)
        self.resets = 0
        return ready

    def launch(self, plan: StepPlan) -> Any:
        self.marked |= {new.row for new in plan.new_rows if new.token_ids.startswith(_MARK)}
        self.on_launch(plan)
        return super().launch(plan)

    def collect(self, ticket: Any) -> StepResult:
        return self.on_result(super().collect(ticket))

    def reset(self) -> None:
        self.resets += 1
        super().reset()

    def poisoned(self, plan: StepPlan) -> bool:
        return not self.marked.isdisjoint(plan.rows)


class WorkerHosts:
    """Makes workers for an engine, and keeps them at hand."""

    def __init__(self) -> None:
        self.worker: Meddler = None  # type: ignore[assignment]

    def __call__(self, folder: Path) -> Any:
        self.worker = Meddler(folder)
        return self.worker


def changed(result: StepResult, **fields: Any) -> StepResult:
    return msgspec.structs.replace(result, **fields)
