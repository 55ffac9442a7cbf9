"""The worker: loads a model from a folder and executes plans, on a CPU or a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, assert_never

import torch
from msgspec.structs import replace

from troupellm.models.adapters.prepared import PreparedAdapters
from troupellm.models.batch.row_table import PlanError
from troupellm.models.checkpoint.safetensors import unchanged
from troupellm.models.gpu.device import empty_cache
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.hub.model_folder import readable
from troupellm.models.layers.decoder import Decoder
from troupellm.models.load.weight_state import RESTART, require_same, weight_state
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.runner.encoder_runner import EncoderRunner
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.runner.threads import GivenThreads, StepThreads
from troupellm.models.worker.loader import LoadedModel, load_model
from troupellm.models.worker.open_kv_tiers import make_mover
from troupellm.protocol.config.engine import EngineConfig, WorkerConfig
from troupellm.protocol.errors import InvalidRequest, WeightsChanged
from troupellm.protocol.messages.adapters import NO_ADAPTERS, AdapterPreparation
from troupellm.protocol.messages.sleep import (
    SleepWorker,
    StartProfile,
    StopProfile,
    WakeWorker,
    WorkerCommand,
    WorkerReport,
)
from troupellm.protocol.messages.weight_file import WeightFile
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, StepPlan, StepResult, WorkerReady
from troupellm.protocol.messages.worker_abilities import Wait
from troupellm.protocol.params.guide import GuideProgram

if TYPE_CHECKING:
    from troupellm.models.worker.load_encoder import LoadedEncoder
    from troupellm.models.worker.profile import StepProfile


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A ticket. A CPU does not compute by itself: its step is computed when it is collected."""

    step: int
    plan: StepPlan
    launched: LaunchedPlan | None = None
    """The plan that a GPU is computing."""


class ModelWorker:
    """A `protocol.worker.Worker` for one model folder."""

    def __init__(self, folder: Path) -> None:
        """folder: a checkpoint in Hugging Face's format; not read before `load`."""
        self._folder = folder
        self._loaded: LoadedModel | LoadedEncoder | None = None
        self._runner: ModelRunner | CudaRunner | EncoderRunner | None = None
        self._ready: WorkerReady | None = None
        self._profile: StepProfile | None = None
        self._given_threads: GivenThreads | None = None
        self._threads = StepThreads(1)
        self._ranks: Ranks | None = None
        self._meanwhile: Callable[[], None] | None = None
        self._first: WorkerReady | None = None

    def expect_weights(self, first: WorkerReady) -> None:
        """As `protocol.worker_abilities.ExpectsWeights`."""
        self._first = first

    def lead(self, config: EngineConfig, size: int) -> str:
        """As `protocol.worker_abilities.HasRanks`."""
        from troupellm.models.parallel import meet  # which a model of one rank does not need

        self._ranks, address = meet.lead(size, meet.seconds(config))
        return address

    def follow(self, config: EngineConfig, number: int, size: int, address: str) -> Callable[[], None]:
        """As `protocol.worker_abilities.HasRanks`."""
        from troupellm.models.parallel import meet
        from troupellm.models.worker.load_follower import load_follower

        ranks = self._ranks = meet.follow(address, number, size, meet.seconds(config))
        self._folder = readable(self._folder, config.model.model, config.model.allow_model_links)
        self._same_weights(config)
        self._set_threads(config.worker)
        return load_follower(self._folder, config, ranks).follow

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        """Read the model and take the memory.

        Raises:
            ModelLoadError: the checkpoint cannot be served.
            WeightsChanged: its weights are others than those of a worker before it.
            ConfigError: a setting does not fit the model or the machine.
        """
        self._folder = readable(self._folder, config.model.model, config.model.allow_model_links)
        with unchanged(self._folder):
            begin, first = perf_counter(), self._first
            weights = self._same_weights(config)
            self._set_threads(config.worker)
            loaded = self._loaded = load_model(self._folder, config, progress, self._ranks)
            self.reset()
            self._settle_threads(config.worker)
            if isinstance(self._runner, CudaRunner):
                self._runner.graphs.warm_up(progress)
            progress(LoadProgress(phase="warm_up", done=1, total=1, detail=loaded.note))
            self._ready = replace(loaded.ready(perf_counter() - begin), weight_files=weights)
            if first is not None and first.fingerprint not in ("", self._ready.fingerprint):
                raise WeightsChanged("the weights on disk are others than those that are served", hint=RESTART)
            return self._ready

    def _same_weights(self, config: EngineConfig) -> tuple[WeightFile, ...]:
        """The state of the weights on disk. Raises WeightsChanged: it is not that of the first worker."""
        weights, first = weight_state(self._folder, config.model), self._first
        if first is not None and not first.fingerprint:
            require_same(first.weight_files, weights)
        return weights

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Take a plan in hand. On a CPU it costs nothing before its turn; a GPU begins with it at once."""
        if self._runner is None:
            raise RuntimeError("launch was called before load, or after close")
        if isinstance(self._runner, CudaRunner):
            if self._meanwhile is not None:
                self._meanwhile()  # a step that the host looks into is computed here
            self._begin_moves(plan)
            return LaunchedStep(plan.step, plan, self._runner.launch(plan))
        return LaunchedStep(plan.step, plan)

    def under_way(self, ticket: LaunchedStep) -> Wait | None:
        """As `protocol.worker_abilities.WorksAhead`."""
        done = None if ticket.launched is None else ticket.launched.done
        return None if done is None or done.happened else done.wait

    def incomplete(self, ticket: LaunchedStep) -> bool:
        """As `protocol.worker_abilities.WorksAhead`: rows with guides choose when their last tokens are known."""
        return ticket.launched is not None and ticket.launched.choice is not None

    def complete(self, _: LaunchedStep) -> None:
        """As `protocol.worker_abilities.WorksAhead`."""
        if isinstance(self._runner, CudaRunner):
            self._runner.flights.complete()

    def _begin_moves(self, plan: StepPlan) -> None:
        """Before anything of the plan is written."""
        moves = None if self._loaded is None else self._loaded.moves
        if moves is not None:
            poison = None if isinstance(self._runner, EncoderRunner | None) else self._runner.poison
            moves.begin(plan, None if poison is None else poison.before_loads)
        elif plan.transfers or plan.lookups:
            raise PlanError(f"step {plan.step}: this worker has no tier to move blocks to")

    def collect(self, ticket: LaunchedStep) -> StepResult:
        """Compute a launched plan. Tickets are given back in the order in which they were taken."""
        if self._runner is None or self._loaded is None:
            raise RuntimeError("collect was called after close")
        if isinstance(self._runner, CudaRunner):
            assert ticket.launched is not None
            result = self._runner.collect(ticket.launched)
        else:
            self._begin_moves(ticket.plan)
            drafts = self._runner.num_drafts if isinstance(self._runner, ModelRunner) else 0
            with self._threads.step(sum(ticket.plan.counts) + drafts):
                result = self._runner.run(ticket.plan, self._meanwhile)
        if self._loaded.moves is not None:
            result = self._loaded.moves.reported(result, idle=not ticket.plan.rows)
        if self._loaded.drafter is not None:
            result = self._loaded.drafter.reported(result)
        if self._profile is not None:
            self._profile.stepped()
        return result

    def meanwhile(self, call: Callable[[], None]) -> None:
        """As `protocol.worker_abilities.HasMeanwhile`."""
        self._meanwhile = call

    def idle(self) -> bool:
        """As `protocol.worker_abilities.HasIdleWork`: a GPU's graphs are captured."""
        return isinstance(self._runner, CudaRunner) and self._runner.idle()

    def command(self, command: WorkerCommand, progress: ProgressSink) -> WorkerReport:
        """Sleep, wake, or profile steps. No plan is under way.

        Raises:
            ModelLoadError: the weights cannot be read any more; the worker sleeps on.
            GraphCaptureError: the device is of no more use.
            InvalidRequest: there is nothing to stop, or nowhere to write to.
        """
        loaded = self._loaded
        if loaded is None:
            raise RuntimeError("a command came before load, or after close")
        match command:
            case SleepWorker():
                if self._ranks is not None:
                    raise InvalidRequest("an engine of several ranks does not sleep yet", code="sleep_unsupported")
                if isinstance(self._runner, CudaRunner):
                    self._runner.check()  # a device that is broken gives nothing back
                self._runner = None
                if loaded.drafter is not None:
                    loaded.drafter.forget()
                if loaded.moves is not None:
                    loaded.moves.sleep(command.level)
                if self._adapters is not None:
                    self._adapters.clear()
                report = loaded.parts.sleep(command)
                empty_cache()
                return report
            case WakeWorker():
                return loaded.parts.wake(command, progress, self._woken)
            case StartProfile():
                from troupellm.models.worker.profile import StepProfile  # which takes a while to import

                self._profile = self._profile or StepProfile()
                return self._profile.start(command)
            case StopProfile():
                if self._profile is None:
                    raise InvalidRequest("no profile is being recorded", code="no_profile")
                return self._profile.stop()
            case _:
                assert_never(command)

    def _woken(self) -> WorkerReady | None:
        assert self._loaded is not None
        if not self._loaded.parts.complete:
            return None
        self._start(self._loaded)
        return self._ready

    @property
    def runner(self) -> ModelRunner | CudaRunner | EncoderRunner | None:
        """The current runner. For benchmarks: they can repeat the `graphs` of a GPU's runner by themselves."""
        return self._runner

    def reset(self) -> None:
        """Start over with the weights and the cache's memory, and nothing else."""
        if self._loaded is None or not self._loaded.parts.complete:
            raise RuntimeError("reset was called before load, after close, or in its sleep")
        if self._loaded.moves is not None:
            self._loaded.moves.forget()
        if self._adapters is not None:
            self._adapters.clear()
        self._start(self._loaded)

    def _start(self, loaded: "LoadedModel | LoadedEncoder") -> None:
        self._runner = None
        if isinstance(loaded, LoadedModel) and loaded.moves is not None:
            loaded.moves.attach(partial(make_mover, loaded.parts.cache))
        self._runner = loaded.fresh_runner()

    def close(self) -> None:
        """Release memory and thread settings, when the device has finished its work; may be called twice."""
        if isinstance(self._runner, CudaRunner):
            self._runner.settle()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.moves is not None:
            loaded.moves.close()
        self._runner = None
        if loaded is not None and loaded.guides is not None:
            loaded.guides.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._given_threads is not None:
            self._given_threads.put_back()
            self._given_threads = None

    def prepare_guide(self, program: GuideProgram) -> None:
        """Build a guide before a row needs it. Slow; fit for any thread, beside a step. Never raises."""
        loaded = self._loaded
        if loaded is not None and loaded.guides is not None:
            loaded.guides.prepare(program)

    def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        """As `protocol.worker_abilities.PreparesAdapters`."""
        adapters = self._adapters
        return NO_ADAPTERS if adapters is None else adapters.prepare(digest, Path(folder))

    def release_adapter(self, digest: str) -> None:
        """As `protocol.worker_abilities.PreparesAdapters`."""
        if self._adapters is not None:
            self._adapters.release(digest)

    @property
    def _adapters(self) -> PreparedAdapters | None:
        return self._loaded.adapters if isinstance(self._loaded, LoadedModel) else None

    def _set_threads(self, settings: WorkerConfig) -> None:
        number = settings.num_threads
        if number is None and self._ranks is not None:
            number = max(1, torch.get_num_threads() // self._ranks.size)
        self._given_threads = GivenThreads(number)
        self._threads = StepThreads(self._given_threads.number, steady=settings.batch_invariant)

    def _settle_threads(self, settings: WorkerConfig) -> None:
        """Steps of a batch-invariant model take any number of threads where that changes no bit of its logits."""
        runner = self._runner
        if not settings.batch_invariant or settings.logits_processors or not isinstance(runner, ModelRunner):
            return
        decoder, given = runner.decoder, self._given_threads
        if isinstance(decoder, Decoder) and decoder.thread_invariant and runner.attention.compiled and given:
            self._threads = StepThreads(given.number)
