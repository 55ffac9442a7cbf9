"""The company: who exists, who may talk to whom, what happens when an edge is full, and what happens after a crash.

Everything about the actors as a whole is declared here: the table of edges, the supervision of each, the order in which
they start and stop. The actors know their mailboxes only.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, Never

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.admission import Admission
from troupellm.actors.detokenizer import TextTables
from troupellm.actors.intake import Intake
from troupellm.actors.mailbox import Mailbox
from troupellm.actors.metrics import MetricsSink, MetricsStore
from troupellm.actors.output import Output
from troupellm.actors.ports import Clock, Randomness, Threads
from troupellm.actors.requests import OpenRequests, StallWatch
from troupellm.actors.scheduler.actor import Scheduler
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.supervise import Child, Supervisor
from troupellm.actors.worker import WorkerActor
from troupellm.models.chat_template import ChatTemplate
from troupellm.models.tokenizer import Tokenizer
from troupellm.protocol.config import EngineConfig
from troupellm.protocol.errors import EngineStopped, RequestFailed, TroupeError, WorkerCrashed
from troupellm.protocol.intake import IntakeMessage, PrepareRequest
from troupellm.protocol.metrics import MetricsMessage, RequestCancelled
from troupellm.protocol.output import OpenRequest, OutputMessage, RequestClosed
from troupellm.protocol.sampling import Limits
from troupellm.protocol.scheduler import SchedulerControl, SchedulerMessage
from troupellm.protocol.snapshot import ActorSnapshot, SchedulerSnapshot
from troupellm.protocol.worker import StepPlan, Worker, WorkerReady

STAGE_SECONDS = 2.0
"""How long each actor gets to drain at the end before it is cancelled."""
CONTROLS_PER_SEQUENCE = 8
"""Control messages that may wait per sequence inside: its end, a pause, a resumption, and repeats of them."""
CONTROL_SLACK = 4096

Overflow = Literal["wait", "credit", "drop"]


class Edge(msgspec.Struct, frozen=True):
    sender: str
    receiver: str
    message: str
    capacity: int
    overflow: Overflow
    """wait: the sender waits. credit: the sender never has more under way. drop: counted and forgotten."""


def edges(config: EngineConfig) -> tuple[Edge, ...]:
    """The data lanes. No more requests are open than admission lets in, so a step's result always finds room.

    Control lanes, which never wait: output to scheduler (StopStringMet), outbox to scheduler (AbortRequest,
    ReaderPaused, ReaderResumed), engine to scheduler (AbortRequest).

    An HTTP front in a process of its own stands beside "engine": its requests come in by the same edge, after a place
    was taken for each; what goes to it merges in each request's outbox while much waits in its socket.
    """
    plans = config.scheduler.plans_in_flight
    requests = config.scheduler.max_num_seqs + config.scheduler.max_num_queued_reqs
    return (
        Edge("engine", "intake", "PrepareRequest", 64, "wait"),
        Edge("intake", "output", "OpenRequest", 64, "wait"),
        Edge("intake", "scheduler", "SubmitRequest", requests, "wait"),
        Edge("scheduler", "worker", "StepPlan", plans, "credit"),
        Edge("worker", "scheduler", "StepFinished", plans, "credit"),
        Edge("scheduler", "output", "StepOutput", 16, "wait"),
        Edge("scheduler", "metrics", "StepStats, RequestStats", 1024, "drop"),
        Edge("engine", "metrics", "RequestRejected", 64, "drop"),
    )


class Company(msgspec.Struct, frozen=True, kw_only=True):
    """What the actors are made from."""

    config: EngineConfig
    ready: WorkerReady
    limits: Limits
    worker: Worker
    tokenizer: Tokenizer
    tables: TextTables
    chat_template: ChatTemplate
    thread: Threads
    pool: Threads
    clock: Clock
    randomness: Randomness
    hash_key: bytes
    """Keys the hashes of the prefix cache."""


class System:
    """The running tree. `run` never raises: a failure ends in `failure`, and everybody who waits is answered."""

    def __init__(self, company: Company) -> None:
        self._company = company
        config = company.config
        capacity: dict[str, int] = {}
        for edge in edges(config):
            capacity[edge.receiver] = capacity.get(edge.receiver, 0) + edge.capacity
        self.intake: Mailbox[IntakeMessage, Never] = Mailbox("intake", capacity["intake"])
        self.scheduler: Mailbox[SchedulerMessage, SchedulerControl] = Mailbox(
            "scheduler",
            capacity["scheduler"],
            control_capacity=CONTROLS_PER_SEQUENCE * capacity["scheduler"] + CONTROL_SLACK,
        )
        self.worker: Mailbox[StepPlan, Never] = Mailbox("worker", capacity["worker"])
        self.output: Mailbox[OutputMessage, Never] = Mailbox("output", capacity["output"])
        self.metrics: Mailbox[MetricsMessage, Never] = Mailbox("metrics", capacity["metrics"])
        self.stalls: Mailbox[Never, Never] = Mailbox("stalls", 1)
        self.admission = Admission(config.scheduler, company.clock)
        self.requests = OpenRequests(company.clock, self.scheduler.control, self._on_cancelled)
        self.store = MetricsStore(company.ready.max_model_len)
        self.failure: Exception | None = None
        self._rows = count()
        self.ended = anyio.Event()
        self._scheduler = self._build_scheduler()
        self._worker = self._build_worker()
        self._supervisor = Supervisor(self._children(), company.clock)
        self._scope = anyio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the tree until `stop`, or until a crash that supervision could not mend."""
        try:
            with self._scope:
                await self._supervisor.run(task_status=task_status)
        except Exception as error:  # the end of the line: from here the failure travels as an answer
            self.failure = error
        finally:
            try:
                for mailbox in self._stages:  # nobody takes from them any more: who waits for room must hear of it
                    mailbox.close()
                self._answer_everyone()
            finally:
                self.ended.set()

    async def stop(self) -> None:
        """End the open requests, then stop stage by stage from the door inwards; what does not drain is cancelled."""
        try:
            self._supervisor.let_return()
            self._answer_everyone()
            for mailbox in self._stages:
                mailbox.close()
                with anyio.move_on_after(STAGE_SECONDS):
                    await self._supervisor.returned(mailbox.name)
        finally:
            self._scope.cancel()
            await self.ended.wait()

    @property
    def _stages(self) -> Sequence[Mailbox[Any, Any]]:
        """From the door inwards."""
        return self.intake, self.scheduler, self.worker, self.output, self.stalls, self.metrics

    def actor_snapshots(self) -> tuple[ActorSnapshot, ...]:
        mailboxes = (self.intake, self.scheduler, self.worker, self.output, self.metrics)
        restarts = self._supervisor.restarts
        return tuple(ActorSnapshot(box.name, restarts[box.name], (box.snapshot(),)) for box in mailboxes)

    @property
    def scheduler_snapshot(self) -> SchedulerSnapshot:
        return self._scheduler.published

    @property
    def last_step(self) -> float | None:
        """When a step last finished, on the engine's clock."""
        return self._worker.last_step

    def _children(self) -> list[Child]:
        """The supervision table, in start order: consumers before their producers."""
        children = [
            Child(
                name="metrics",
                build=lambda: MetricsSink(self.metrics, self.store),
                mailboxes=(self.metrics,),
                strategy="restart",
                on_crash=_nobody_waits,
            ),
            Child(
                name="output",
                build=self._build_output,
                mailboxes=(self.output,),
                strategy="restart",
                on_crash=self._on_output_crash,
            ),
            # The scheduler's block tables describe the worker's memory: neither survives the other.
            Child(
                name="worker",
                build=lambda: self._worker,
                mailboxes=(self.worker,),
                strategy="stop",
                on_crash=_nobody_waits,
            ),
            Child(
                name="scheduler",
                build=lambda: self._scheduler,
                mailboxes=(self.scheduler,),
                strategy="stop",
                on_crash=_nobody_waits,
            ),
            Child(
                name="intake",
                build=self._build_intake,
                mailboxes=(self.intake,),
                strategy="restart",
                on_crash=self._on_intake_crash,
            ),
        ]
        timeout = self._company.config.stream.stall_timeout
        if timeout:
            children.append(
                Child(
                    name="stalls",
                    build=lambda: StallWatch(self.stalls, self.requests, self._company.clock, timeout),
                    mailboxes=(self.stalls,),
                    strategy="restart",
                    on_crash=_nobody_waits,
                )
            )
        return children

    def _build_intake(self) -> Intake:
        company = self._company
        return Intake(
            self.intake,
            self.output,
            self.scheduler,
            tokenizer=company.tokenizer,
            chat_template=company.chat_template,
            limits=company.limits,
            ready=company.ready,
            threads=company.pool,
            randomness=company.randomness,
            rows=self._rows,
            hash_key=company.hash_key if company.config.cache.enable_prefix_caching else None,
        )

    def _build_scheduler(self) -> Scheduler:
        company = self._company
        core = SchedulerCore(
            company.config.scheduler,
            company.ready,
            enable_prefix_caching=company.config.cache.enable_prefix_caching,
            hash_key=company.hash_key,
        )
        return Scheduler(core, self.scheduler, self.worker, self.output, self.metrics, company.clock)

    def _build_worker(self) -> WorkerActor:
        company = self._company
        return WorkerActor(
            self.worker,
            self.scheduler,
            company.worker,
            company.thread,
            company.clock,
            company.config.worker,
            company.config.scheduler.plans_in_flight,
        )

    def _build_output(self) -> Output:
        company = self._company
        interval = company.config.stream.flush_interval or 0.0
        return Output(
            self.output,
            company.tables,
            self.scheduler.control,
            company.clock,
            flush_interval=interval,
            on_closed=self._on_closed,
        )

    def _on_output_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """Who was opened has lost the text that was held back; who is still on the way in goes on."""
        lost = {message.request for message in owed if isinstance(message, OpenRequest)}
        for outbox in self.requests:
            if outbox.prompt_token_ids is not None or outbox.request in lost:
                self.requests.end(outbox, _restarting("the output processor crashed", cause))

    def _on_intake_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """The message in hand is at fault; everything else that has not begun may be sent again."""
        guilty = next((message.request for message in owed if isinstance(message, PrepareRequest)), None)
        for outbox in self.requests:
            if outbox.request == guilty:
                error = RequestFailed("the request could not be prepared")
                error.__cause__ = cause
                self.requests.end(outbox, error)
            elif not outbox.started:
                self.requests.end(outbox, _restarting("the input processor crashed", cause))

    def _answer_everyone(self) -> None:
        """Nobody is let in any more, and every open request gets its last word."""
        self.admission.close()
        by = "shutdown" if self.failure is None else None
        self.requests.end_all(lambda: self.error("the engine was closed"), by=by)

    def queue_deadline(self, wanted: float | None) -> float | None:
        """Seconds that a request may wait to begin: as long as it wants, and never longer than any may."""
        most = self._company.config.scheduler.queue_timeout
        return min((seconds for seconds in (wanted, most) if seconds is not None), default=None)

    def _on_closed(self, closed: RequestClosed) -> None:
        self.requests.closed(closed.request, closed.usage, began=closed.scheduled is not None)

    def _on_cancelled(self, by: str) -> None:
        self.metrics.offer(RequestCancelled(by))

    def error(self, stopped: str) -> TroupeError:
        """Why requests end: the root cause as `__cause__` when there is one, else `stopped`."""
        cause = self.failure
        if cause is None:
            return EngineStopped(stopped)
        error: TroupeError
        if isinstance(cause, WorkerCrashed):
            error = WorkerCrashed(cause.message, code="engine_failed")
        elif "actor: worker" in getattr(cause, "__notes__", ()):
            error = WorkerCrashed("the model worker crashed; the engine has stopped", code="engine_failed")
        else:
            error = EngineStopped("the engine has failed", code="engine_failed")
        error.__cause__ = cause
        return error


def _nobody_waits(cause: Exception, owed: Sequence[Any]) -> None:
    """What these actors owe is no single request's answer, or is answered when the engine fails."""


def _restarting(message: str, cause: Exception) -> TroupeError:
    error = EngineStopped(message, code="engine_restarting")
    error.__cause__ = cause
    return error
