"""Starts the actors, answers for those that crash, and stops them stage by stage.

`tables` declares which actors may talk to each other and what follows a crash; the actors know their mailboxes only.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskStatus

from troupellm.actors.adapters.actor import AdapterLibrary, AdapterSources
from troupellm.actors.admission.admission import Admission
from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.engine.open_requests import OpenRequests, StallWatch
from troupellm.actors.engine.sleep import PauseAndSleep
from troupellm.actors.engine.watchdog import Pulse, Stuck, Watchdog
from troupellm.actors.engine.wiring import Builder, EngineParts, Mailboxes, MediaParts
from troupellm.actors.guide.actor import Guide
from troupellm.actors.kv_cache.events import KVEventLog
from troupellm.actors.metrics.actor import MetricsSink, MetricsStore
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.supervise import Actor, Child, Supervisor
from troupellm.models.media.description import text_only
from troupellm.protocol.errors import (
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    RequestFailed,
    TroupeError,
    WorkerCrashed,
)
from troupellm.protocol.messages.adapter_library import AdapterControl, AdapterMessage, DropAdapter, ServeAdapter
from troupellm.protocol.messages.adapters import ADAPTERS_GONE, AdapterPreparation
from troupellm.protocol.messages.guide import BuildGuide, GuideRequest
from troupellm.protocol.messages.input import ChatPrompt, PrepareRequest
from troupellm.protocol.messages.live_view import SchedulerView
from troupellm.protocol.messages.metrics import RequestCancelled, RequestRejected
from troupellm.protocol.messages.output import OpenRequest, RequestClosed, StepOutput
from troupellm.protocol.messages.scheduler import AbortRequest, AdapterLoaded, GuideBuilt, SchedulerControl
from troupellm.protocol.messages.snapshot import ActorSnapshot, GuideSnapshot, MediaSnapshot, SchedulerSnapshot
from troupellm.protocol.messages.worker import RestartWorker
from troupellm.protocol.params.checks import printable

if TYPE_CHECKING:
    from troupellm.actors.media.actor import Media

__all__ = ["EngineParts", "System"]

_SNAPSHOT_TRIES = 8
STAGE_SECONDS = 2.0
"""How long each actor gets to drain at the end before it is cancelled."""
WRITE_SECONDS = 0.3
"""Seconds for writing KV blocks at the end of a drain that has taken all its time: a server must end soon after."""

OnCrash = Callable[[Exception, list[Any]], None]


class System:
    """The running tree. `run` never raises: a failure ends in `failure`, and everybody who waits is answered."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        boxes = self._boxes = Mailboxes(parts.config, sees=parts.media is not None)
        self.intake, self.scheduler, self.worker = boxes.intake, boxes.scheduler, boxes.worker
        self.output, self.metrics, self.guide = boxes.output, boxes.metrics, boxes.guide
        self.adapters, self.media = boxes.adapters, boxes.media
        self.admission = Admission(parts.config.scheduler, parts.clock)
        self.requests = OpenRequests(
            parts.clock, self._send_to_scheduler, self._on_cancelled, lambda: self._count(RequestRejected("invalid"))
        )
        self.sleep_control = PauseAndSleep(
            self.scheduler, self.worker, self.admission, self.requests, lambda: self.error("the engine was closed")
        )
        self.sleep_control.gives_back = parts.config.parallel.tensor_parallel_size == 1
        self.store = MetricsStore(parts.ready.max_model_len)
        self.failure: Exception | None = None
        self.drained_by: float | None = None
        """When a drain is to be over, on the engine's clock."""
        self.ended = anyio.Event()
        cache = parts.config.cache
        self.kv_events: KVEventLog | None = None
        if cache.kv_events != "off":
            self.kv_events = KVEventLog(
                cache.kv_events_buffer, parts.ready.block_size, with_tokens=cache.kv_events == "tokens"
            )
        self._builder = Builder(parts, boxes, self._on_closed, self.kv_events)
        self._scheduler = self._builder.scheduler()
        self._worker = self._builder.worker()
        self._guide = self._builder.guide()
        self._library: AdapterLibrary | None = None
        self._images: Media | None = None
        self._supervisor = Supervisor(self._children(), parts.clock)
        self._scope = anyio.CancelScope()
        self._alarm: str | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the tree until `stop`, or until a crash that supervision could not mend."""
        try:
            with self._scope:
                await self._supervisor.run(task_status=task_status)
        except Exception as error:  # the end of the line: from here the failure travels as an answer
            self.failure = error
        finally:
            try:
                for mailbox in self._stages:  # no actor takes from them any more: waiting producers must be told
                    mailbox.close()
                self._answer_everyone()
            finally:
                self.sleep_control.end()
                if self.kv_events is not None:
                    self.kv_events.close()
                self.ended.set()

    async def stop(self) -> None:
        """End the open requests, then stop stage by stage from the door inwards; what does not drain is cancelled."""
        try:
            self._supervisor.let_return()
            self.sleep_control.call_off()
            self._answer_everyone()
            if self._parts.ready.tiers:
                await self.sleep_control.write_out(self._write_seconds())
            for mailbox in self._stages:
                mailbox.close()
                with anyio.move_on_after(STAGE_SECONDS):
                    await self._supervisor.returned(mailbox.name)
        finally:
            self._scope.cancel()
            await self.ended.wait()

    def _write_seconds(self) -> float:
        """How long KV blocks may be written that wait for it: what a drain has left, or as long as a stage."""
        if self.drained_by is None:
            return STAGE_SECONDS
        return max(WRITE_SECONDS, self.drained_by - self._parts.clock.now())

    @property
    def _stages(self) -> Sequence[Mailbox[Any, Any]]:
        """From the door inwards, and before them who watches."""
        boxes = self._boxes
        watches = boxes.watchdog, boxes.stalls
        library = () if self.adapters is None else (self.adapters,)
        images = () if self.media is None else (self.media,)
        front = *watches, *images, *library, self.intake, self.guide
        return *front, self.scheduler, self.worker, self.output, self.metrics

    def actor_snapshots(self) -> tuple[ActorSnapshot, ...]:
        mailboxes = [box for box in self._stages if box not in (self._boxes.watchdog, self._boxes.stalls)]
        restarts = self._supervisor.restarts | {"worker": self._worker.losses - self._worker.num_sleeps}
        return tuple(ActorSnapshot(box.name, restarts[box.name], (box.snapshot(),)) for box in mailboxes)

    @property
    def scheduler_snapshot(self) -> SchedulerSnapshot:
        """The numbers of one moment; read from another thread, of neighbouring ones."""
        for _ in range(_SNAPSHOT_TRIES):
            with suppress(RuntimeError):  # a dict has changed while another thread went through it
                return self._scheduler.snapshot()
        return self._scheduler.snapshot()

    def scheduler_view(self) -> SchedulerView:
        return self._scheduler.live_view()

    @property
    def guide_snapshot(self) -> GuideSnapshot:
        return self._guide.snapshot()

    @property
    def media_snapshot(self) -> MediaSnapshot | None:
        return None if self._images is None else self._images.snapshot()

    @property
    def last_step(self) -> float | None:
        """When a step last finished, on the engine's clock."""
        return self._worker.last_step

    @property
    def busy_since(self) -> float | None:
        """When the step that is under way began, on the engine's clock; None while the worker is idle."""
        return self._worker.busy_since

    @property
    def unready(self) -> str | None:
        """Why requests had better go elsewhere just now, though they are taken; None when all is well."""
        if self._worker.restarting is not None:
            return f"the model worker is restarting: {self._worker.restarting}"
        return self._alarm

    def _children(self) -> list[Child]:
        """In start order, as the supervision table has them."""
        boxes, config = self._boxes, self._parts.config
        children = [
            _child("metrics", lambda: MetricsSink(self.metrics, self.store), self.metrics, _nobody_waits),
            _child("output", self._builder.output, self.output, self._on_output_crash),
            _child("worker", lambda: self._worker, self.worker, _nobody_waits),
            _child("scheduler", lambda: self._scheduler, self.scheduler, _nobody_waits),
            _child("guide", self._build_guide, self.guide, self._on_guide_crash),
            _child("intake", self._builder.intake, self.intake, self._on_intake_crash),
        ]
        if boxes.adapters is not None and (sources := self._parts.adapters) is not None:
            build = partial(self._build_library, boxes.adapters, sources)
            children.append(_child("adapters", build, boxes.adapters, self._on_library_crash))
        if boxes.media is not None and (media := self._parts.media) is not None:
            build_media = partial(self._build_media, boxes.media, media)
            children.append(_child("media", build_media, boxes.media, self._on_library_crash))
        if stall := config.stream.stall_timeout:
            clock = self._parts.clock
            children.append(
                _child("stalls", lambda: StallWatch(boxes.stalls, self.requests, clock, stall), boxes.stalls)
            )
        if config.worker.watchdog_timeout:
            children.append(_child("watchdog", self._build_watchdog, boxes.watchdog))
        return children

    def _build_guide(self) -> Guide:
        self._guide = self._builder.guide()
        return self._guide

    def _build_library(self, inbox: Mailbox[AdapterMessage, AdapterControl], sources: AdapterSources) -> AdapterLibrary:
        self._library = self._builder.adapters(inbox, sources, self._prepare_adapter, lambda: self._worker.losses)
        return self._library

    def _build_media(self, inbox: Mailbox[PrepareRequest, AbortRequest], media: MediaParts) -> "Media":
        self._images = self._builder.media(inbox, media)
        return self._images

    async def _prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        if self._worker.restarting is not None:  # a read of a lost worker may count as the next one's
            return ADAPTERS_GONE
        return await self._parts.worker_host.prepare_adapter(digest, folder)

    def _build_watchdog(self) -> Watchdog:
        return Watchdog(
            self._boxes.watchdog,
            self._pulse,
            timeout=self._parts.config.worker.watchdog_timeout,
            alarm=self._on_alarm,
            mend=self._mend,
            crash=self._supervisor.crash,
        )

    def _pulse(self) -> Pulse:
        worker = self._worker
        return Pulse(
            scheduler=self.scheduler_snapshot,
            actors=self.actor_snapshots(),
            last_step=worker.last_step,
            computing=worker.busy_since is not None or worker.restarting is not None or worker.executing,
        )

    def _on_alarm(self, text: str | None) -> None:
        self._alarm = text

    def _mend(self, stuck: Stuck) -> None:
        """Wake who may have missed its wake-up; a worker that has lost a plan is replaced."""
        plan_is_lost = stuck.actor == "worker" and not self.worker.depth
        for mailbox in self._stages:
            mailbox.nudge()
        if plan_is_lost:
            self.worker.control(RestartWorker(stuck.what, self._worker.losses, fault=False))

    def _on_output_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """Open requests have lost the text that was held back; requests that are not yet open go on.

        The ends that the message in hand tells of are told nowhere else, and the usage of those requests is still owed.
        """
        for message in owed:
            for closed in message.closed if isinstance(message, StepOutput) else ():
                self._on_closed(closed)
        lost = {message.request for message in owed if isinstance(message, OpenRequest)}
        for outbox in self.requests:
            if outbox.prompt_token_ids is not None or outbox.request in lost:
                self.requests.end(outbox, _restarting("the output processor crashed", cause))

    def _on_intake_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """The message in hand is at fault; those whose preparation was cut short have been told so by the actor."""
        guilty = {message.request for message in owed if isinstance(message, PrepareRequest)}
        for outbox in self.requests:
            if outbox.request in guilty:
                error = RequestFailed("the request could not be prepared")
                error.__cause__ = cause
                self.requests.end(outbox, error)

    def _on_guide_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """Those that waited have been told by the actor."""
        for message in owed:
            if isinstance(message, GuideRequest):
                message.opened.outbox.fail(_restarting("the guide actor crashed", cause))
                message.opened.outbox.wake()
            elif isinstance(message, BuildGuide):
                self.scheduler.control(GuideBuilt(message.program, message.engine_epoch, "lost"))

    def _on_library_crash(self, cause: Exception, owed: Sequence[Any]) -> None:
        """Those that waited have been told by the actor."""
        text = "an actor before the input processor crashed"
        for message in owed:
            if isinstance(message, PrepareRequest):
                message.outbox.fail(_restarting(text, cause))
                message.outbox.wake()
            elif isinstance(message, ServeAdapter):
                late = AdapterPreparation(outcome="late", error=text)
                self.scheduler.control(AdapterLoaded(message.digest, self._worker.losses, late))
            elif isinstance(message, DropAdapter):
                self._parts.worker_host.release_adapter(message.digest)
            elif not isinstance(message, AbortRequest):
                message.done(_restarting(text, cause))

    def _send_to_scheduler(self, message: SchedulerControl) -> None:
        """From an outbox to the scheduler; a request that waits for its guide or its adapter is not known there yet."""
        if isinstance(message, AbortRequest):
            if self.guide.depth or self._guide.busy:
                self.guide.control(message)
            if self.adapters is not None and (self.adapters.depth or (self._library and self._library.busy)):
                self.adapters.control(message)
            if self.media is not None and (self.media.depth or (self._images and self._images.busy)):
                self.media.control(message)
        self.scheduler.control(message)

    def _answer_everyone(self) -> None:
        """Admit no more requests, and end every open one."""
        self.admission.close()
        by = "shutdown" if self.failure is None else None
        self.requests.end_all(lambda: self.error("the engine was closed"), by=by)

    def require_media(self, prompt: ChatPrompt) -> Mailbox[PrepareRequest, AbortRequest]:
        """The media actor's mailbox, for a prompt with images.

        Raises:
            InvalidRequest: no images are taken.
        """
        if self.media is None:
            field, names = prompt.media[0].field, self._parts.config.model
            name = names.served_model_name[0] if names.served_model_name else names.model or "served"
            raise InvalidRequest(f"{field}: {text_only(name, self._parts.config.media)}", param=field)
        return self.media

    def require_adapters(self, name: str) -> Mailbox[AdapterMessage, AdapterControl]:
        """The adapter library's mailbox, for a request that names an adapter.

        Raises:
            ModelNotFound: no adapters are served.
        """
        if self.adapters is None:
            raise ModelNotFound(f"no adapter {printable(name)}: adapters are served with enable_lora", param="model")
        return self.adapters

    def queue_deadline(self, wanted: float | None) -> float | None:
        """Seconds that a request may wait to begin: as long as it wants, and never longer than any may."""
        most = self._parts.config.scheduler.queue_timeout
        return min((seconds for seconds in (wanted, most) if seconds is not None), default=None)

    def _on_closed(self, closed: RequestClosed) -> None:
        self.requests.closed(closed.request, closed.spent)

    def _on_cancelled(self, by: str) -> None:
        self._count(RequestCancelled(by))

    def _count(self, event: RequestCancelled | RequestRejected) -> None:
        if not self.metrics.closed:
            self.metrics.offer(event)

    def error(self, stopped: str) -> TroupeError:
        """Why requests end: the root cause as `__cause__` when there is one, else `stopped`."""
        if (cause := self.failure) is None:
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
    """These actors owe no request an answer, or the failure of the engine answers it."""


def _child(
    name: str, build: Callable[[], Actor], mailbox: Mailbox[Any, Any], on_crash: OnCrash = _nobody_waits
) -> Child:
    rule = SUPERVISION[name]
    return Child(
        name=name,
        build=build,
        mailboxes=(mailbox,),
        strategy=rule.strategy,
        intensity=rule.intensity,
        hint=rule.hint,
        on_crash=on_crash,
    )


def _restarting(message: str, cause: Exception) -> TroupeError:
    error = EngineStopped(message, code="engine_restarting")
    error.__cause__ = cause
    return error
