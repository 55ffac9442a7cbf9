"""A worker with a device that is done with a step when a test says so."""

import threading
from collections import defaultdict

from troupellm.load_tests.workers.fake import FakeWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import LaunchedStep, StepPlan, StepResult, WorkerReady
from troupellm.protocol.messages.worker_abilities import Wait
from troupellm.protocol.params.guide import GuideProgram

PATIENCE = 30.0
"""Seconds after which what a test waits for does not come any more."""


class HandDevice(FakeWorker):
    """Implements `WorksAhead`.

    Attributes:
        calls: of the worker, in their order.
        threads: that made them.
        at_once: steps that are done when they are launched.
        broken: steps that the device cannot end.
        late: steps of which a part is still to be launched.
    """

    def __init__(self) -> None:
        super().__init__("by hand", num_blocks=8, context=64)
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.waiting_threads: set[int] = set()
        self.at_once: set[int] = set()
        self.broken: set[int] = set()
        self.late: set[int] = set()
        self.guides: list[GuideProgram] = []
        self._launched: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._waited: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._done: defaultdict[int, threading.Event] = defaultdict(threading.Event)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._note(f"launch {plan.step}")
        self._launched[plan.step].set()
        return super().launch(plan)

    def under_way(self, ticket: LaunchedStep, /) -> Wait | None:
        return None if ticket.step in self.at_once else lambda: self._wait(ticket.step)

    def incomplete(self, ticket: LaunchedStep, /) -> bool:
        return ticket.step in self.late

    def complete(self, ticket: LaunchedStep, /) -> None:
        self._note(f"complete {ticket.step}")
        self.late.discard(ticket.step)

    def collect(self, ticket: LaunchedStep) -> StepResult:
        self._note(f"collect {ticket.step}")
        if ticket.step not in self.at_once:
            assert self._done[ticket.step].is_set(), "a step was collected before it was done"
        if ticket.step in self.broken:
            raise RuntimeError("the device is broken")
        return super().collect(ticket)

    def reset(self) -> None:
        self._note("reset")

    def prepare_guide(self, program: GuideProgram) -> None:
        self.guides.append(program)

    def ready(self) -> WorkerReady:
        """The result of loading it."""
        return self.load(EngineConfig(), lambda progress: None)

    def finish(self, *steps: int) -> None:
        """The device is done with them."""
        for step in steps:
            self._done[step].set()

    def until_launched(self, step: int) -> None:
        assert self._launched[step].wait(PATIENCE), f"step {step} was not launched"

    def until_waited(self, step: int) -> None:
        """Return once a thread waits for the step."""
        assert self._waited[step].wait(PATIENCE), f"nobody waits for step {step}"

    def _wait(self, step: int) -> None:
        self.waiting_threads.add(threading.get_ident())
        self._waited[step].set()
        assert self._done[step].wait(PATIENCE), f"step {step} was never finished"
        if step in self.broken:
            raise RuntimeError("the device is broken")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())
