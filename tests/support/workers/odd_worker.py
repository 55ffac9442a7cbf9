"""A model worker that waits, hangs or fails as the environment of `odd_server` says: on a thread of the server or in a
process of its own, which inherits the environment.
"""

import os
import time
from pathlib import Path

from troupellm.models.worker.worker import LaunchedStep, ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import ProgressSink, StepPlan, WorkerReady

POLL_SECONDS = 0.01


class OddWorker(ModelWorker):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._until, self._hang, self._fail = (_file(name) for name in ("LOAD_UNTIL", "HANG_WHEN", "FAIL_WHEN"))
        self._seconds = float(os.environ.get("ODD_STEP_SECONDS", "0"))

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        while self._until is not None and not self._until.exists():
            time.sleep(POLL_SECONDS)
        return super().load(config, progress)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self._fail is not None and self._fail.exists():
            raise RuntimeError("odd: every step fails")
        while self._hang is not None and self._hang.exists():
            time.sleep(POLL_SECONDS)
        time.sleep(self._seconds)
        return super().launch(plan)


def _file(name: str) -> Path | None:
    """That a variable names."""
    value = os.environ.get(f"ODD_{name}")
    return Path(value) if value else None
