"""An engine's life: configured, started, draining, failed or stopped. `Engine` adds what one can ask of it."""

import os
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from troupellm.actors.engine.start import Running, WorkerFactory, start
from troupellm.actors.runtime.ports import (
    OwnTask,
    Randomness,
    SeededRandomness,
    SystemClock,
    SystemRandomness,
    require_asyncio,
)
from troupellm.actors.runtime.processes import Processes, SystemProcesses
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError, EngineStopped, TroupeError
from troupellm.protocol.messages.live_view import LiveView, MailboxView
from troupellm.protocol.messages.snapshot import ActorSnapshot, EngineSnapshot, MailboxSnapshot, SchedulerSnapshot
from troupellm.protocol.messages.worker import ProgressSink


class EngineLife:
    """See the module; constructed as `Engine` is."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        progress: ProgressSink | None = None,
        worker: WorkerFactory | str | None = None,
        processes: Processes | None = None,
        **settings: Any,
    ) -> None:
        if model is not None:
            settings["model"] = os.fspath(model)
        self.config = _configured(config, settings)
        self._progress = progress
        self._factory = worker
        self._processes = processes or SystemProcesses()
        self._clock = SystemClock()
        self._randomness: Randomness = (
            SeededRandomness(self.config.model.seed) if self.config.model.seed else SystemRandomness()
        )
        self._started_at: float | None = None
        self._running: Running | None = None
        self._stack: AsyncExitStack | None = None
        self._failure: Exception | None = None
        self._entered = self._draining = self._stopped = False
        self._owner: OwnTask | None = None
        self._leave: anyio.Event | None = None

    # The engine's life.

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("an engine can be entered once")
        self._entered = True
        try:
            async with AsyncExitStack() as stack:
                self._running = await start(
                    stack,
                    self.config,
                    progress=self._progress,
                    factory=self._factory,
                    processes=self._processes,
                    clock=self._clock,
                    randomness=self._randomness,
                    snapshot=self.snapshot,
                )
                self._started_at = self._clock.now()
                self._stack = stack.pop_all()
        finally:
            self._stopped = self._stack is None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running is not None:
            if self._running.machinery.loop.forked:  # nothing of it is this process's to end
                return
            self._running.machinery.loop.check()
        stack, self._stack = self._stack, None
        if stack is not None:
            self._draining = True
            try:
                await stack.__aexit__(None, None, None)  # the block's own exception is none of ours to wrap
            finally:
                self._failure = self.failure
                self._running = None
                self._stopped = True

    @classmethod
    async def open(cls, model: str | os.PathLike[str] | None = None, **settings: Any) -> Self:
        """Start outside a block, in a task of its own; the caller that opens it must `aclose`.

        Raises:
            WrongEventLoop: no event loop of asyncio runs here.
        """
        require_asyncio()
        engine = cls(model, **settings)
        opened, engine._leave = anyio.Event(), anyio.Event()
        failed: list[BaseException] = []
        engine._owner = OwnTask(engine._live(opened, engine._leave, failed))
        try:
            await opened.wait()
        except BaseException:
            engine._owner.cancel()
            await engine.aclose()
            raise
        if failed:
            await engine._owner.join()
            raise failed[0]
        return engine

    async def aclose(self) -> None:
        """Leave the engine, from any task of the event loop on which it was opened. Idempotent; does nothing after a
        fork.

        Raises:
            WrongEventLoop: the engine lives on another event loop.
        """
        if self._owner is None:
            await self.__aexit__(None, None, None)
            return
        assert self._leave is not None
        if self._running is not None:
            if self._running.machinery.loop.forked:
                return
            self._running.machinery.loop.check()
        self._leave.set()
        with anyio.CancelScope(shield=True):
            await self._owner.join()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let the open ones finish for `timeout` seconds, fail the rest with EngineStopped.

        Closing the engine afterwards writes KV blocks that are on their way to disk or to connectors, for what is left
        of that time.
        """
        system = self._on_loop().system
        self._draining = True
        system.admission.close()
        system.drained_by = self._clock.now() + timeout
        if not await system.requests.wait_empty(timeout):
            system.requests.end_all(lambda: EngineStopped("the engine is shutting down"), by="shutdown")

    async def wait_failed(self) -> Exception | None:
        """Wait until the engine stops running; gives the root cause, or None when it was closed."""
        system = self._on_loop().system
        await system.ended.wait()
        return system.failure

    @property
    def state(self) -> str:
        """starting, ready, draining, failed, stopped."""
        if self.failure is not None:
            return "failed"
        if self._stopped:
            return "stopped"
        if self._draining:
            return "draining"
        return "starting" if self._running is None else "ready"

    @property
    def failure(self) -> Exception | None:
        """The root cause, once the engine has failed."""
        return self._failure if self._running is None else self._running.system.failure

    def snapshot(self) -> EngineSnapshot:
        """The state of everything, in plain numbers."""
        running, now = self._running, self._clock.now()
        uptime = 0.0 if self._started_at is None else now - self._started_at
        if running is None:
            return EngineSnapshot(
                state=self.state, uptime_seconds=uptime, model="", max_model_len=0, open_requests=0,
                scheduler=SchedulerSnapshot(), actors=(),
            )  # fmt: skip
        last, busy = running.system.last_step, running.system.busy_since
        return EngineSnapshot(
            state=self.state,
            uptime_seconds=uptime,
            model=running.loaded.names[0],
            max_model_len=running.limits.max_model_len,
            open_requests=len(running.system.requests),
            scheduler=running.system.scheduler_snapshot,
            actors=running.system.actor_snapshots(),
            unready=running.system.unready,
            paused=running.system.sleep_control.paused,
            sleep_level=running.system.sleep_control.level,
            last_step_age_seconds=None if last is None else now - last,
            step_seconds=None if busy is None else now - busy,
            tenants=running.system.admission.quotas.snapshot(),
            prompt_tokens_computed=running.system.store.batch_tokens["prefill"],
            worker_pid=running.loaded.worker_host.pid,
            spare_worker_pid=running.loaded.worker_host.spare_pid,
            rank_pids=running.loaded.worker_host.rank_pids,
            guide=running.system.guide_snapshot,
            media=running.system.media_snapshot,
            kv_events=None if running.system.kv_events is None else running.system.kv_events.snapshot(),
        )

    def live_view(self) -> LiveView:
        """The picture that the page draws; from the engine's own event loop.

        Raises:
            TroupeError: the engine does not run.
        """
        system = self._on_loop().system
        seen = self.snapshot()
        scheduler = seen.scheduler
        return LiveView(
            state=seen.state,
            model=seen.model,
            notice=seen.unready or ("the engine is paused" if seen.paused else ""),
            uptime_ms=round(seen.uptime_seconds * 1_000),
            open_requests=seen.open_requests,
            running=scheduler.running,
            waiting=scheduler.waiting,
            paused=scheduler.paused,
            blocks_total=scheduler.blocks_total,
            blocks_free=scheduler.blocks_free,
            blocks_cached=scheduler.blocks_cached,
            tokens_generated=scheduler.tokens_generated,
            prompt_tokens=seen.prompt_tokens_computed,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=scheduler.steps,
            recent=system.store.recent_steps(),
            actors=tuple([_mailbox_view(actor, box) for actor in seen.actors for box in actor.mailboxes]),
            scheduler=system.scheduler_view(),
        )

    def _require(self) -> Running:
        if self._running is None:
            raise self._refusal()
        return self._running

    def _on_loop(self) -> Running:
        """The running engine, for a call that must come from its event loop. Raises WrongEventLoop."""
        running = self._require()
        running.machinery.loop.check()
        return running

    def _refusal(self) -> TroupeError:
        if self._running is not None and self.failure is not None:
            return self._running.system.error("the engine has failed")
        return EngineStopped(f"the engine is {self.state}", code=self.state)

    async def _live(self, opened: anyio.Event, leave: anyio.Event, failed: list[BaseException]) -> None:
        """The life of an engine that was opened outside a block."""
        try:
            async with self:
                opened.set()
                await leave.wait()
        except BaseException as error:
            if opened.is_set():
                raise
            failed.append(error)
        finally:
            opened.set()


def _configured(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    """`settings` on top of `config`, checked.

    Raises:
        ConfigError: a wrong setting, or replicas, which a server has.
    """
    made = _merged(config, settings)
    if made.parallel.data_parallel_size > 1:
        text = f"data_parallel_size must be 1 in an Engine, got {made.parallel.data_parallel_size}: it is one engine"
        raise ConfigError(f"{text}; `troupellm serve -dp N` serves replicas", param="data_parallel_size")
    return made


def _merged(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if config is not None and not settings:
        return config
    flat: dict[str, Any] = {}
    if config is not None:
        for section in msgspec.structs.asdict(config).values():
            flat.update(msgspec.structs.asdict(section))
    return EngineConfig.from_flat({**flat, **settings})


def _mailbox_view(actor: ActorSnapshot, box: MailboxSnapshot) -> MailboxView:
    return MailboxView(actor.name, actor.restarts, box.depth, box.capacity, box.messages, box.dropped)
