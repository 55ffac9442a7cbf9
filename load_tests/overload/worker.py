"""A worker whose steps take a fixed time and no processor: what is late beside it is the engine's own doing."""

import time

from troupellm.load_tests.fake_worker import FakeWorker
from troupellm.protocol.worker import StepPlan, Ticket

CONTEXT = 4096
NUM_BLOCKS = 8192


class PacedWorker(FakeWorker):
    """Steps follow each other on a clock, so they do not add up small delays."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__("paced", num_blocks=NUM_BLOCKS, context=CONTEXT)
        self._step = step_seconds
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> Ticket:
        self._free_at = max(self._free_at, time.perf_counter()) + self._step
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return super().launch(plan)
