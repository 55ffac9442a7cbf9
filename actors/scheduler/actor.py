"""Scheduler actor: decides what each step computes.

Owns:      every request between its submission and its end, and the accounting of the KV cache.
Receives:  SchedulerMessage; on the control lane SchedulerControl.
Sends:     StepPlan to the worker (never more un-answered than credits), RestartWorker after a reply that is nonsense,
           StepOutput to the output actor, statistics to the metrics sink (by offer: what does not fit is dropped
           there and counted), BuildGuide to the guide actor and ServeAdapter and DropAdapter to the adapter library,
           on their control lanes.
On crash:  the engine fails with the root cause: no other actor knows the tokens that the requests have so far.
"""

from typing import Never, assert_never

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.scheduler.live_view import view_of
from troupellm.actors.scheduler.plans import BrokenResult
from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, PrefetchSession
from troupellm.protocol.messages.adapter_library import AdapterControl, AdapterMessage
from troupellm.protocol.messages.guide import GuideControl, GuideMessage
from troupellm.protocol.messages.live_view import SchedulerView
from troupellm.protocol.messages.metrics import MetricsMessage
from troupellm.protocol.messages.output import OutputMessage, StepOutput
from troupellm.protocol.messages.scheduler import (
    AbortRequest,
    AdapterLoaded,
    GuideBuilt,
    PausePlanning,
    ReaderPaused,
    ReaderResumed,
    ResetPrefixCache,
    ResumePlanning,
    SchedulerControl,
    SchedulerMessage,
    StepFinished,
    StopStringMet,
    SubmitRequest,
    WantAdapter,
    WorkerAsleep,
    WorkerLost,
    WorkerRestarted,
    WriteOut,
)
from troupellm.protocol.messages.sleep import WorkerControl
from troupellm.protocol.messages.snapshot import SchedulerSnapshot
from troupellm.protocol.messages.worker import RestartWorker, StepPlan, StepResult
from troupellm.protocol.params.guide import BuildOutcome


class Scheduler:
    """The asynchronous shell: one receive loop around a `SchedulerCore`."""

    def __init__(
        self,
        core: SchedulerCore,
        inbox: Mailbox[SchedulerMessage, SchedulerControl],
        worker: Mailbox[StepPlan, WorkerControl],
        output: Mailbox[OutputMessage, Never],
        metrics: Mailbox[MetricsMessage, Never],
        clock: Clock,
        guide: Mailbox[GuideMessage, GuideControl] | None = None,
        adapters: Mailbox[AdapterMessage, AdapterControl] | None = None,
    ) -> None:
        """
        Args:
            guide: has the worker build guides, for a core that `builds_guides`.
            adapters: has the worker read adapters, for a core that serves them.
        """
        self._core = core
        self._inbox = inbox
        self._worker = worker
        self._output = output
        self._metrics = metrics
        self._clock = clock
        self._guide = guide
        self._adapters = adapters

    def snapshot(self) -> SchedulerSnapshot:
        return self._core.snapshot()

    def live_view(self) -> SchedulerView:
        return view_of(self._core, self._clock.now())

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while await self._inbox.wait(self._timeout()) or not self._inbox.closed:
            outputs: list[StepOutput] = []
            while (message := self._inbox.take()) is not None:
                output = self._handle(message)
                if output is not None:
                    outputs.append(output)
            self._send_plans()
            self._ask_for_guides()
            if self._adapters is not None:
                self._ask_for_adapters(self._adapters)
            ended = self._core.take_output()
            if ended is not None:
                outputs.append(ended)
            if self._core.pause_control.asked:
                self._core.pause_control.review()
            if self._core.kv_events is not None:
                self._core.kv_events.flush()
            self._send_stats()
            try:
                for output in outputs:
                    await self._output.put(output)
            except MailboxClosed:
                return  # the engine stops, and outputs are not read any more
            await checkpoint()

    def _handle(self, message: SchedulerMessage | SchedulerControl) -> StepOutput | None:
        match message:
            case StepFinished(result=result):
                return self._update(result)
            case SubmitRequest():
                self._core.submit(message)
            case AbortRequest(request=request):
                self._core.abort(request)
            case StopStringMet(row=row):
                self._core.stop_string_met(row)
            case ReaderPaused(request=request):
                self._core.pause(request)
            case ReaderResumed(request=request):
                self._core.resume(request)
            case ResetPrefixCache(external=external, done=done):
                self._core.reset_prefix_cache(external=external, done=done)
            case WriteOut(written=written):
                self._core.go_on()
                self._core.pause_control.write_out(written)
            case PausePlanning(finish=finish, settled=settled):
                self._core.pause_control.begin(settled, finish=finish)
            case ResumePlanning():
                self._core.go_on()
            case WorkerAsleep(keeps_host=keeps_host):
                self._core.worker_sleeps(keeps_host=keeps_host)
            case WorkerLost():
                self._core.lose_worker(message)
            case WorkerRestarted(ready=ready):
                self._core.worker_restarted(ready)
            case GuideBuilt():
                self._core.guide_built(message)
            case AdapterLoaded():
                self._core.adapter_loaded(message)
            case WantAdapter(digest=digest, folder=folder):
                if self._core.adapters is not None:
                    self._core.adapters.want(digest, folder)
            case KeepTurn() | PrefetchSession() | DropSession():
                self._core.leases.handle(message)
            case _:
                assert_never(message)
        return None

    def _update(self, result: StepResult) -> StepOutput | None:
        try:
            return self._core.update(result, self._clock.now())
        except BrokenResult as error:
            self._worker.control(RestartWorker(str(error), self._core.engine_epoch))
            return None

    def _send_plans(self) -> None:
        """Before the outputs, so that the worker computes while text is made."""
        while (plan := self._core.plan(self._clock.now())) is not None:
            if not self._worker.offer(plan):
                raise RuntimeError("the worker has no room for a plan, although there was a credit for it")

    def _ask_for_guides(self) -> None:
        """After the plans, which find the sequences that must wait."""
        for ask in self._core.take_builds():
            if self._guide is not None and not self._guide.closed:
                self._guide.control(ask)
            else:
                outcome: BuildOutcome = "built"  # the guide actor has ended: the row builds it
                self._inbox.control(GuideBuilt(ask.program, ask.engine_epoch, outcome))

    def _ask_for_adapters(self, library: Mailbox[AdapterMessage, AdapterControl]) -> None:
        if self._core.adapters is not None and not library.closed:
            for ask in self._core.adapters.take_asks():
                library.control(ask)

    def _send_stats(self) -> None:
        for stats in self._core.take_stats():
            try:
                self._metrics.offer(stats)
            except MailboxClosed:
                return

    def _timeout(self) -> float | None:
        """Seconds until a plan is due though nothing happens: see `SchedulerCore.next_deadline`."""
        deadline = self._core.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock.now())
