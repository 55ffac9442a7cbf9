"""The worker: loads a model from a folder and executes plans, on a CPU or a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, assert_never

import torch

from troupellm.kernels import paged_attention
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.kv_quant import cache_dtype
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError
from troupellm.models.checkpoint.safetensors import unchanged
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.pooling_config import classifier_activation, decoder_ability
from troupellm.models.families.registry import is_encoder
from troupellm.models.gpu.device import empty_cache
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.placement import DTYPES, GpuPlace, find_device
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.hub.model_folder import readable
from troupellm.models.kv_offload.host_memory import memory_left
from troupellm.models.kv_offload.transfers import TransferEngine
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.cache_layout import with_cache_groups
from troupellm.models.layers.decoder import Decoder, RunnableDecoder
from troupellm.models.layers.encoder import Encoder
from troupellm.models.load.architecture import open_config
from troupellm.models.load.fingerprint import SameModel, same_model
from troupellm.models.load.implementation import describe_served
from troupellm.models.load.notes import attention_note, report_compiling
from troupellm.models.load.read_decoder import read_decoder, stored_format
from troupellm.models.memory.drafter_needs import DrafterNeeds
from troupellm.models.memory.plan import MemoryBudget, model_limit, plan_memory
from troupellm.models.memory.stored_size import stored_size
from troupellm.models.quantization.stated import settle_quantization
from troupellm.models.runner.encoder_runner import EncoderRunner
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.runner.threads import GivenThreads, StepThreads
from troupellm.models.runner.warm_up import warmed
from troupellm.models.sampling.logits_processors import load_processors
from troupellm.models.speculation.drafter import Drafter
from troupellm.models.speculation.plan import plan_drafting
from troupellm.models.structured_outputs.guided_rows import Guides
from troupellm.models.tokenizer.served import load_tokenizer
from troupellm.models.worker.load_encoder import LoadedEncoder, refuse_for_encoders
from troupellm.models.worker.open_kv_tiers import make_mover, open_offload
from troupellm.models.worker.quantization_report import quantization_report
from troupellm.models.worker.ready import decoder_ready
from troupellm.models.worker.sleep import Parts
from troupellm.protocol.config.engine import EngineConfig, WorkerConfig
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.sleep import (
    SleepWorker,
    StartProfile,
    StopProfile,
    WakeWorker,
    WorkerCommand,
    WorkerReport,
)
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, StepPlan, StepResult, WorkerReady
from troupellm.protocol.messages.worker_abilities import Wait
from troupellm.protocol.params.guide import GuideProgram

if TYPE_CHECKING:
    from troupellm.models.worker.profile import StepProfile

CPU = torch.device("cpu")


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
        self._runner: ModelRunner | EncoderRunner | None = None
        self._fresh_runner: Callable[[], ModelRunner | EncoderRunner] | None = None
        self._parts: Parts[RunnableDecoder, KVCache] | Parts[Encoder, tuple[()]] | None = None
        self._ready: WorkerReady | None = None
        self._profile: StepProfile | None = None
        self._guides: Guides | None = None
        self._drafter: Drafter | None = None
        self._moves: TransferEngine | None = None
        self._given_threads: GivenThreads | None = None
        self._threads = StepThreads(1)
        self._meanwhile: Callable[[], None] | None = None

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        """Read the model and take the memory.

        Raises:
            ModelLoadError: the checkpoint cannot be served.
            ConfigError: a setting does not fit the model or the machine.
        """
        self._folder = readable(self._folder, config.model.model, config.model.allow_model_links)
        with unchanged(self._folder):
            return self._load(config, progress)

    def _load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        begin = perf_counter()
        gpu = find_device(config.worker.device)
        self._set_threads(config.worker)
        report_compiling(progress, on_cpu=gpu is None)
        reader, config = settle_quantization(self._folder, open_config(self._folder, progress), config)
        dtype = DTYPES.get(config.model.dtype, torch.float32)  # auto; on a GPU the place decides
        if is_encoder(reader):
            return self._load_encoder(reader, config, dtype, progress, begin)
        described = describe_served(self._folder, reader, config.model, progress)
        place = None if gpu is None else GpuPlace(gpu, config)
        dtype = dtype if place is None else place.dtype(described)
        device = CPU if gpu is None else gpu.torch_device
        form = stored_format(self._folder, reader, config.model)
        hybrid = not config.cache.disable_hybrid_kv_cache_manager
        model = with_cache_groups(described, model_limit(described, config), hybrid=hybrid)
        ability = decoder_ability(self._folder, reader, config.model, model)
        activation = classifier_activation(reader, model.num_labels) if model.head == "score" else "softmax"
        backend = config.worker.attention_backend
        invariant, cached = config.worker.batch_invariant, cache_dtype(config.cache.kv_cache_dtype, dtype)
        # Before anything large is read.
        attention = plan_attention(
            model, config.cache.block_size, dtype, backend=backend, kv_dtype=cached, batch_invariant=invariant,
            device=device,
        )  # fmt: skip
        drafting = plan_drafting(config, self._folder, model, model_limit(described, config), dtype, device, progress)
        budget = plan_memory(
            model, config, dtype, memory_left(config) if place is None else place.available(),
            stored_size(self._folder, model, form, dtype, device), device=device, on_gpu=place is not None,
            drafter=drafting.needs,
        )  # fmt: skip
        progress(LoadProgress(phase="weights", total=budget.weight_bytes, detail=budget.table()))
        same = same_model(self._folder, model, config, dtype, cached, budget.max_model_len, drafting.digests)
        read = partial(
            read_decoder, self._folder, model, form, config.model, dtype, budget, device=device,
            drafts_itself=drafting.drafts_itself,
        )  # fmt: skip
        parts = self._parts = Parts[RunnableDecoder, KVCache](
            lambda sink: _read(partial(read, progress=sink), same, invariant=invariant),
            lambda: _make_cache(place, model, budget, config, cached, drafting.needs),
        )
        decoder = parts.read(progress)
        if place is not None:
            budget = place.measured(budget, decoder, cached, drafter=drafting.needs)
            progress(LoadProgress(phase="kv_cache", detail=budget.table()))
        progress(LoadProgress(phase="kv_cache", total=budget.kv_cache_bytes, detail=quantization_report(decoder)))
        cache = parts.reserve()
        processors = load_processors(config.worker.logits_processors, model.vocab_size, device)
        progress(LoadProgress(phase="warm_up"))
        if place is None:
            paged_attention.prepare()
        _check(decoder, cache, budget)
        make: Callable[..., ModelRunner] = partial(ModelRunner, attention_backend=backend)
        if place is not None:
            make, saturation = place.make_runner, place.warm_up(decoder, cache, budget, ability, progress)
        else:
            saturation = warmed(make(decoder, cache, max_model_len=budget.max_model_len), ability, config, budget)
        guides = self._guides = Guides(
            partial(load_tokenizer, self._folder, config.model), model.vocab_size, jumps=config.guide.guide_fast_forward
        )
        drafter = self._drafter = Drafter(drafting, config, self._folder, dtype, budget.max_model_len)
        moves = self._moves = open_offload(config, cache, same.fingerprint, num_blocks=budget.num_blocks)
        self._fresh_runner = lambda: make(
            parts.decoder, parts.cache, max_model_len=budget.max_model_len, poison=_poison(config, parts.cache, moves),
            processors=processors, activation=activation, guides=guides.rows(),
            **drafter.speculation(parts.decoder, parts.cache),
        )  # fmt: skip
        self.reset()
        self._settle_threads(config.worker)
        if isinstance(self._runner, CudaRunner):
            self._runner.graphs.warm_up(progress)
        progress(LoadProgress(phase="warm_up", done=1, total=1, detail=attention_note(attention)))
        ready = decoder_ready(
            model, budget, config, dtype, perf_counter() - begin, saturation, processors, device=device.type,
            pooling=ability, fingerprint=same.fingerprint, drafter=drafting.needs, most_drafts=drafter.most,
        )  # fmt: skip
        self._ready = ready if moves is None else moves.described(ready)
        return self._ready

    def _load_encoder(
        self, reader: ConfigReader, config: EngineConfig, dtype: torch.dtype, progress: ProgressSink, begin: float
    ) -> WorkerReady:
        refuse_for_encoders(config)
        encoder = LoadedEncoder(self._folder, reader, config, dtype, progress)
        self._parts, self._fresh_runner = encoder.parts, encoder.fresh_runner
        self.reset()
        self._ready = encoder.ready(perf_counter() - begin)
        return self._ready

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
        if self._moves is not None:
            poison = self._runner.poison if isinstance(self._runner, ModelRunner) else None
            self._moves.begin(plan, None if poison is None else poison.before_loads)
        elif plan.transfers or plan.lookups:
            raise PlanError(f"step {plan.step}: this worker has no tier to move blocks to")

    def collect(self, ticket: LaunchedStep) -> StepResult:
        """Compute a launched plan. Tickets are given back in the order in which they were taken."""
        if self._runner is None:
            raise RuntimeError("collect was called after close")
        if isinstance(self._runner, CudaRunner):
            assert ticket.launched is not None
            result = self._runner.collect(ticket.launched)
        else:
            self._begin_moves(ticket.plan)
            drafts = self._runner.num_drafts if isinstance(self._runner, ModelRunner) else 0
            with self._threads.step(sum(ticket.plan.counts) + drafts):
                result = self._runner.run(ticket.plan, self._meanwhile)
        if self._moves is not None:
            result = self._moves.reported(result, idle=not ticket.plan.rows)
        if self._drafter is not None:
            result = self._drafter.reported(result)
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
        if self._parts is None:
            raise RuntimeError("a command came before load, or after close")
        match command:
            case SleepWorker():
                if isinstance(self._runner, CudaRunner):
                    self._runner.check()  # a device that is broken gives nothing back
                self._runner = None
                if self._drafter is not None:
                    self._drafter.forget()
                if self._moves is not None:
                    self._moves.sleep(command.level)
                report = self._parts.sleep(command)
                empty_cache()
                return report
            case WakeWorker():
                return self._parts.wake(command, progress, self._woken)
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
        assert self._parts is not None
        if not self._parts.complete:
            return None
        self._start()
        return self._ready

    @property
    def runner(self) -> ModelRunner | EncoderRunner | None:
        """The current runner. For benchmarks: they can repeat the `graphs` of a GPU's runner by themselves."""
        return self._runner

    def reset(self) -> None:
        """Start over with the weights and the cache's memory, and nothing else."""
        if self._fresh_runner is None or self._parts is None or not self._parts.complete:
            raise RuntimeError("reset was called before load, after close, or in its sleep")
        if self._moves is not None:
            self._moves.forget()
        self._start()

    def _start(self) -> None:
        assert self._fresh_runner is not None
        self._runner = None
        if self._moves is not None:
            assert self._parts is not None
            cache = self._parts.cache
            assert isinstance(cache, KVCache)
            self._moves.attach(partial(make_mover, cache))
        self._runner = self._fresh_runner()

    def close(self) -> None:
        """Release memory and thread settings, when the device has finished its work; may be called twice."""
        if isinstance(self._runner, CudaRunner):
            self._runner.settle()
        if self._moves is not None:
            self._moves.close()
            self._moves = None
        self._runner = self._fresh_runner = self._parts = self._drafter = None
        if self._guides is not None:
            self._guides.close()
            self._guides = None
        if self._given_threads is not None:
            self._given_threads.put_back()
            self._given_threads = None

    def prepare_guide(self, program: GuideProgram) -> None:
        """Build a guide before a row needs it. Slow; fit for any thread, beside a step. Never raises."""
        if self._guides is not None:
            self._guides.prepare(program)

    def _set_threads(self, settings: WorkerConfig) -> None:
        self._given_threads = GivenThreads(settings.num_threads)
        self._threads = StepThreads(self._given_threads.number, steady=settings.batch_invariant)

    def _settle_threads(self, settings: WorkerConfig) -> None:
        """Steps of a batch-invariant model take any number of threads where that changes no bit of its logits."""
        runner = self._runner
        if not settings.batch_invariant or settings.logits_processors or not isinstance(runner, ModelRunner):
            return
        decoder, given = runner.decoder, self._given_threads
        if isinstance(decoder, Decoder) and decoder.thread_invariant and runner.attention.compiled and given:
            self._threads = StepThreads(given.number)


def _read(read: Callable[[], RunnableDecoder], same: SameModel, *, invariant: bool) -> RunnableDecoder:
    with batch_invariant(invariant):
        decoder = read()
    same.check()
    return decoder


def _make_cache(
    place: GpuPlace | None, model: DecoderConfig, budget: MemoryBudget, config: EngineConfig, dtype: torch.dtype,
    drafter: DrafterNeeds,
) -> KVCache:  # fmt: skip
    if place is None:
        size = config.cache.block_size
        return KVCache(model, budget.num_blocks, size, dtype, drafter=drafter.layers, border=drafter.border)
    return place.make_cache(model, budget.num_blocks, dtype, drafter)


def _poison(config: EngineConfig, cache: KVCache, moves: TransferEngine | None) -> Poison | None:
    pattern, when_freed = config.worker.poison_memory, not config.cache.enable_prefix_caching
    return None if pattern == "off" else Poison(cache, pattern, when_freed=when_freed, transfers=moves)


def _check(decoder: RunnableDecoder, cache: KVCache, budget: MemoryBudget) -> None:
    """A model that transformers runs shows that it goes with paged attention."""
    if decoder.config.implementation != "transformers":
        return
    from troupellm.models.transformers_backend.decoder import TransformersDecoder
    from troupellm.models.worker.check_transformers import check_decoder

    assert isinstance(decoder, TransformersDecoder)
    check_decoder(decoder, cache, max_model_len=budget.max_model_len)
