"""The worker of `bench overlap`: it takes its orders from the model's folder, and leaves there what it has measured."""

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from troupellm.load_tests.workers.fake import BLOCK_SIZE, FakeWorker
from troupellm.load_tests.workers.timed import TimedStep, TimedWorker
from troupellm.protocol.messages.worker import StepPlan

FACTORY: Final = "troupellm.load_tests.workers.overlap:make"
ORDERS, FOUND = "overlap.json", "overlap-found.json"
PROMPT_TOKENS = 8
_MORE_STEPS = 64
"""Of every sequence beside those that count: while the first ones decode, others still come."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    running: int
    window: int
    """Steps that make one."""
    windows: int
    device_seconds: float
    """The device's time for a step."""
    launch_seconds: float
    """The processor's time for a launch."""

    @property
    def max_tokens(self) -> int:
        """Of every answer."""
        return self.window * self.windows + self.running + _MORE_STEPS


class OverlapWorker(TimedWorker):
    """Writes down how far apart the ends of steps are on its device, once all sequences decode together."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        blocks = orders.running * (2 + (PROMPT_TOKENS + orders.max_tokens) // BLOCK_SIZE)
        context = PROMPT_TOKENS + orders.max_tokens + BLOCK_SIZE
        super().__init__(
            FakeWorker("timed", num_blocks=blocks, context=context), orders.device_seconds, orders.launch_seconds
        )
        self._found, self._orders = folder / FOUND, orders
        self._ones = (1,) * orders.running
        self._ends: list[float] = []

    def launch(self, plan: StepPlan) -> TimedStep:
        launched = super().launch(plan)
        orders = self._orders
        wanted = orders.window * orders.windows + 1
        if plan.counts == self._ones and not plan.new_rows and len(self._ends) < wanted:
            self._ends.append(self.device.free_at)
            if len(self._ends) == wanted:
                windows = [end - begin for begin, end in pairwise(self._ends[:: orders.window])]
                self._found.write_bytes(msgspec.json.encode(median(windows) / orders.window))
        return launched


def make(folder: Path) -> OverlapWorker:
    """As `protocol.worker_link.resolve` names it."""
    return OverlapWorker(folder, msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders))
