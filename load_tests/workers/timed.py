"""A worker whose device takes a fixed time for each step, and no processor: what is late is the engine's own doing."""

import time
from dataclasses import dataclass
from functools import partial

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import LaunchedStep, ProgressSink, StepPlan, StepResult, Worker, WorkerReady
from troupellm.protocol.messages.worker_abilities import Wait


class TimedDevice:
    """Computes one step after the other, by the clock.

    Attributes:
        free_at: when the last one ends, in seconds of `time.perf_counter`.
    """

    def __init__(self, step_seconds: float) -> None:
        self._step = step_seconds
        self.free_at = 0.0

    def begin(self) -> Wait:
        """Take a step in hand, behind those before it; what sleeps until it is done."""
        self.free_at = max(self.free_at, time.perf_counter()) + self._step
        return partial(_sleep_until, self.free_at)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A ticket."""

    step: int
    ticket: LaunchedStep
    wait: Wait


class TimedWorker:
    """Gives another worker's results, when its device has taken its time. Implements `WorksAhead`."""

    def __init__(self, worker: Worker, step_seconds: float, launch_seconds: float = 0.0) -> None:
        """launch_seconds: of the processor, which every launch takes."""
        self._worker = worker
        self._launch = launch_seconds
        self.device = TimedDevice(step_seconds)

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        return self._worker.load(config, progress)

    def launch(self, plan: StepPlan) -> TimedStep:
        end = time.perf_counter() + self._launch
        ticket = self._worker.launch(plan)
        while time.perf_counter() < end:
            pass
        return TimedStep(plan.step, ticket, self.device.begin())

    def under_way(self, ticket: LaunchedStep, /) -> Wait | None:
        assert isinstance(ticket, TimedStep)
        return ticket.wait

    def incomplete(self, ticket: LaunchedStep, /) -> bool:
        """All of a step is launched at once."""
        return False

    def complete(self, ticket: LaunchedStep, /) -> None:
        """Nothing is left."""

    def collect(self, ticket: LaunchedStep) -> StepResult:
        assert isinstance(ticket, TimedStep)
        ticket.wait()
        return self._worker.collect(ticket.ticket)

    def reset(self) -> None:
        self._worker.reset()

    def close(self) -> None:
        self._worker.close()
