"""A worker in a process of its own, and perhaps a spare one beside it that has imported everything and waits."""

import logging
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec

from troupellm.actors.runtime.processes import Processes
from troupellm.actors.worker.rank_group import RankGroup
from troupellm.actors.worker.remote_worker import RemoteWorker
from troupellm.actors.worker.thread_host import WorkerGone, WorkerStuck
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import GraphCaptureError
from troupellm.protocol.messages.adapters import ADAPTERS_GONE, AdapterPreparation
from troupellm.protocol.messages.sleep import EMPTY, SleepWorker, WakeWorker, WorkerCommand, WorkerReport
from troupellm.protocol.messages.worker import ProgressSink, StepPlan, StepResult, WorkerReady
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram
from troupellm.protocol.wire.worker import (
    Execute,
    Executed,
    Failed,
    Finished,
    FromWorker,
    Launch,
    Load,
    Loaded,
    Progress,
    Refused,
    ReleaseAdapter,
)

logger = logging.getLogger("troupellm.worker")

RELOAD_SILENCE_SECONDS = 120.0
"""A successor that loads and says nothing for so long is given up. The first load may take as long as it likes."""
LOOK_SECONDS = 1.0
"""How often a successor that loads is looked at."""
STOPPED_LOOKS = 2
"""One that a signal has stopped is given up after so many looks in a row."""
SPARE_DELAY_SECONDS = 1.0
"""The first answers after a start come before the spare's imports."""


class ProcessWorker:
    """Implements `WorkerHost`. `factory` is a worker's import path, as `protocol.worker_link.MODEL_WORKER` is."""

    def __init__(
        self, factory: str, config: EngineConfig, processes: Processes, progress: ProgressSink, *, spare: bool
    ) -> None:
        self._factory = factory
        self.locate(Path(), config)
        self._processes = processes
        self._progress = progress
        self._wants_spare = spare
        self._worker: RemoteWorker | None = None
        self._spare: RemoteWorker | None = None
        self._first: WorkerReady | None = None
        """The report of the first worker."""
        self._lost_one = False

    def locate(self, folder: Path, config: EngineConfig) -> None:
        """The model's folder, and the settings with local names for what the hub has: the worker gets no token."""
        self._folder = folder
        self._config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, hf_token=None))

    @property
    def pid(self) -> int | None:
        return _pid(self._worker)

    @property
    def replaceable(self) -> bool:
        return True

    @property
    def stopped(self) -> bool:
        return self._worker is not None and self._worker.stopped

    @property
    def spare_pid(self) -> int | None:
        return None if self._spare is None or self._spare.gone else _pid(self._spare)

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return self._worker.pids if isinstance(self._worker, RankGroup) else ()

    async def prepare(self) -> None:
        """Start a process that imports while other things are read. Raises WorkerGone."""
        ranks = self._config.parallel.tensor_parallel_size
        spare = RemoteWorker() if ranks == 1 else RankGroup(ranks)
        await spare.open(self._processes)
        self._spare = spare

    async def start(self) -> WorkerReady:
        """Load the model for the first time. Each successor must offer the settings and the weights of this worker.

        Raises:
            WeightsChanged: the weights on disk are others than those of the first worker.
            ModelLoadError: the model cannot be served.
            ConfigError: a setting does not fit the model or the machine.
            WorkerGone: the process died over it.
        """
        worker = await self._take_spare()
        worker.send(Load(factory=self._factory, folder=str(self._folder), config=self._config, first=self._first))
        ready = await self._loaded(worker)
        self._config = _pinned(self._config, ready)
        self._first = self._first or ready
        return ready

    def send(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.send(Launch(plan))

    async def receive(self) -> StepResult:
        assert self._worker is not None
        message = await self._worker.next()
        if isinstance(message, Finished):
            return message.result
        if isinstance(message, Failed):
            raise self._error_of(message)
        raise WorkerGone("the worker process said something out of turn")

    async def prepare_guide(self, program: GuideProgram) -> BuildOutcome:
        return "gone" if self._worker is None else await self._worker.prepare_guide(program)

    async def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        return ADAPTERS_GONE if self._worker is None else await self._worker.prepare_adapter(digest, folder)

    def release_adapter(self, digest: str) -> None:
        if self._worker is not None and not self._worker.gone:
            self._worker.send(ReleaseAdapter(digest))

    async def stand_by(self) -> None:
        """Start the spare process, unless there is one."""
        if not self._wants_spare or self.spare_pid is not None:
            return
        if not self._lost_one:
            await anyio.sleep(SPARE_DELAY_SECONDS)
        await self._drop_spare()
        with suppress(WorkerGone):  # the worker itself is well, and a successor is tried when it is needed
            await self.prepare()

    async def command(self, command: WorkerCommand) -> WorkerReport:
        if isinstance(command, SleepWorker) and command.level >= EMPTY:
            await self._drop_spare()  # it holds all that it has imported
        try:
            return await self._execute(command)
        except WorkerGone:
            if isinstance(command, WakeWorker):  # it died in its sleep, and had nothing to lose
                return WorkerReport(ready=await self.restart(), renewed=True)
            raise

    async def _execute(self, command: WorkerCommand) -> WorkerReport:
        if self._worker is None or self._worker.gone:
            raise WorkerGone("the worker process is gone", fault=False)
        self._worker.send(Execute(command))
        while True:
            message = await self._heard(self._worker, "executes a command")
            if isinstance(message, Executed):
                return message.report
            if isinstance(message, Refused):
                raise self._error_of(message.why)
            if not isinstance(message, Progress):
                raise WorkerGone("the worker process said something out of turn")

    def _error_of(self, failed: Failed) -> Exception:
        """The error that a worker raised. A failed graph capture is no row's fault, and the next worker would fail
        too."""
        error = failed.as_error()
        if not isinstance(error, GraphCaptureError):
            return error
        logger.error(
            "%s: from now on worker processes start with enforce_eager, which is slower; --enforce-eager starts so "
            "without losing a worker first",
            error.message,
        )
        eager = msgspec.structs.replace(self._config.worker, enforce_eager=True)
        self._config = msgspec.structs.replace(self._config, worker=eager)
        gone = WorkerGone(error.message, fault=False)
        gone.__cause__ = error
        return gone

    async def restart(self) -> WorkerReady:
        """Kill the worker and start another one, at best the spare."""
        self._lost_one = True
        if self._worker is not None and not await self._worker.end():  # forgotten when it has gone, not before
            raise WorkerStuck("the worker process was killed and does not go")
        self._worker = None
        return await self.start()

    async def close(self) -> bool:
        """End all processes; False when one does not go."""
        workers = [worker for worker in (self._worker, self._spare) if worker is not None]
        for worker in workers:  # before one is waited for: they leave side by side
            worker.kill()
        ended = [await worker.end() for worker in workers]
        self._worker = self._spare = None
        return all(ended)

    async def _take_spare(self) -> RemoteWorker:
        if self._spare is None or self._spare.gone or self._spare.stopped:
            await self._drop_spare()
            await self.prepare()
        assert self._spare is not None
        worker = self._worker = self._spare
        self._spare = None
        return worker

    async def _drop_spare(self) -> None:
        if self._spare is not None:  # forgotten when it has gone, not before: who is cancelled leaves it to `close`
            await self._spare.end()
            self._spare = None

    async def _heard(self, worker: RemoteWorker, doing: str) -> FromWorker:
        """The next message, which comes in time unless the model is loaded for the first time."""
        message: FromWorker | None = None
        if self._first is None:
            return await worker.next()
        with anyio.move_on_after(RELOAD_SILENCE_SECONDS):
            message = await self._unless_stopped(worker, doing)
        if message is None:
            raise WorkerGone(f"a worker process has fallen silent while it {doing}")
        return message

    async def _unless_stopped(self, worker: RemoteWorker, doing: str) -> FromWorker:
        """The next message of a process that no signal has stopped."""
        looks = 0
        while looks < STOPPED_LOOKS:
            with anyio.move_on_after(LOOK_SECONDS):
                return await worker.next()
            looks = looks + 1 if worker.stopped else 0
        raise WorkerGone(f"a worker process was stopped by a signal while it {doing}", fault=False)

    async def _loaded(self, worker: RemoteWorker) -> WorkerReady:
        while True:
            message = await self._heard(worker, "loads the model")
            if isinstance(message, Loaded):
                return message.ready
            if isinstance(message, Progress):
                self._progress(message.progress)
            elif isinstance(message, Failed):
                raise message.as_error()
            else:
                raise WorkerGone("the worker process said something out of turn")


def _pinned(config: EngineConfig, ready: WorkerReady) -> EngineConfig:
    """The settings for a worker's successors: what was accepted under its sizes must fit theirs.

    A number of prompt tokens keeps them from measuring the device again: the scheduler has the first one's measurement.
    """
    scheduler = config.scheduler
    if scheduler.max_num_prefill_tokens == "auto":
        scheduler = msgspec.structs.replace(scheduler, max_num_prefill_tokens=scheduler.max_num_batched_tokens)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, max_model_len=ready.max_model_len),
        cache=msgspec.structs.replace(config.cache, num_gpu_blocks_override=ready.num_blocks),
        scheduler=scheduler,
    )


def _pid(worker: RemoteWorker | None) -> int | None:
    return None if worker is None or worker.child is None else worker.child.pid
