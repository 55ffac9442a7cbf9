"""Loads a model: decides where and how it runs, reads its weights, reserves its cache and computes first steps."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.kv_quant import cache_dtype
from troupellm.kernels.paged_attention.backends import Planner
from troupellm.models.adapters.prepared import PreparedAdapters
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.pooling_config import Activation, classifier_activation, decoder_ability
from troupellm.models.families.registry import is_encoder
from troupellm.models.gpu.placement import GpuPlace, find_device
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.kv_offload.transfers import TransferEngine
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.cache_layout import with_cache_groups
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.load.architecture import open_config
from troupellm.models.load.base_weights import StoredBase
from troupellm.models.load.fingerprint import SameModel, same_model
from troupellm.models.load.implementation import describe_served
from troupellm.models.load.notes import attention_note, report_compiling
from troupellm.models.load.read_decoder import Divided, read_decoder, stored_format
from troupellm.models.load.states import check_states
from troupellm.models.media.description import MediaModel, describe_media
from troupellm.models.memory.plan import MemoryBudget, model_limit, plan_memory, serves_adapters
from troupellm.models.memory.stored_size import stored_size
from troupellm.models.memory.weight_count import weight_count
from troupellm.models.parallel.limits import check_parallel, refuse_ranks
from troupellm.models.parallel.local_config import local_config
from troupellm.models.parallel.orders import Sizes
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.processes.process_limits import available_memory
from troupellm.models.quantization.checkpoint import QuantizationFormat
from troupellm.models.quantization.stated import settle_quantization
from troupellm.models.runner.placement import DTYPES, CpuPlace
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.sampling.logits_processors import Processors, load_processors
from troupellm.models.speculation.drafter import Drafter
from troupellm.models.speculation.plan import Drafting, plan_drafting
from troupellm.models.structured_outputs.guided_rows import Guides
from troupellm.models.tokenizer.served import load_tokenizer
from troupellm.models.worker.load_encoder import LoadedEncoder, refuse_for_encoders
from troupellm.models.worker.open_kv_tiers import open_offload
from troupellm.models.worker.quantization_report import quantization_report
from troupellm.models.worker.ready import decoder_ready
from troupellm.models.worker.sleep import Parts
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.media import MediaAbility
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, WorkerReady
from troupellm.protocol.params.pooling import PoolingAbility

if TYPE_CHECKING:
    from troupellm.models.media.tower import Tower


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Decisions about a decoder that are made before anything large is read."""

    folder: Path
    config: EngineConfig
    place: CpuPlace | GpuPlace
    model: DecoderConfig
    """As it is run, cache groups included."""
    form: QuantizationFormat | None
    """How the weights are stored, if quantized."""
    dtype: torch.dtype
    cached: torch.dtype
    """Of keys and values."""
    whole: DecoderConfig
    """The model as it is described; of several ranks, `model` is the part of each."""
    attention: Planner
    drafting: Drafting
    ability: PoolingAbility | None
    activation: Activation
    """Of a classifier's logits."""
    budget: MemoryBudget
    same: SameModel
    media: MediaModel | None
    """None: no images are served."""

    @classmethod
    def of(
        cls,
        folder: Path,
        reader: ConfigReader,
        config: EngineConfig,
        place: CpuPlace | GpuPlace,
        progress: ProgressSink,
    ) -> Self:
        """
        Raises:
            ModelLoadError: the checkpoint cannot be served.
            ConfigError: a setting does not fit the model or the machine.
        """
        described = describe_served(folder, reader, config.model, progress)
        dtype, device = place.dtype(described), place.torch_device
        form = stored_format(folder, reader, config.model)
        whole = described
        if place.ranks is not None:
            check_parallel(folder, described, config, form)
            described = local_config(described, place.ranks.size)
        longest, hybrid = model_limit(described, config), not config.cache.disable_hybrid_kv_cache_manager
        model = with_cache_groups(described, longest, hybrid=hybrid)
        ability = decoder_ability(folder, reader, config.model, model)
        cached = cache_dtype(config.cache.kv_cache_dtype, dtype)
        attention = plan_attention(
            model,
            config.cache.block_size,
            dtype,
            backend=config.worker.attention_backend,
            kv_dtype=cached,
            batch_invariant=config.worker.batch_invariant,
            device=device,
        )
        check_states(model, config, on_gpu=place.on_gpu)
        drafting = plan_drafting(config, folder, model, longest, dtype, device, progress)
        stored = stored_size(folder, model, form, dtype, device)
        media = describe_media(folder, config.media) if model.text_part and model.head == "lm" else None
        room = place.available()
        if media is not None:
            room = (available_memory() if room is None else room) - encoder_bytes(folder, config, dtype)
        budget = plan_memory(
            model, config, dtype, room, stored, device=device, on_gpu=place.on_gpu, drafter=drafting.needs
        )
        return cls(
            folder=folder,
            config=config,
            place=place,
            model=model,
            form=form,
            dtype=dtype,
            cached=cached,
            whole=whole,
            attention=attention,
            drafting=drafting,
            ability=ability,
            activation=classifier_activation(reader, model.num_labels) if model.head == "score" else "softmax",
            budget=budget,
            same=same_model(folder, model, config, dtype, cached, budget.max_model_len, drafting.digests),
            media=media,
        )

    def read(self, progress: ProgressSink) -> RunnableDecoder:
        """Read the weights, the same ones every time.

        Raises:
            ModelLoadError: a file is missing or damaged, or the weights are others than the first time.
        """
        with batch_invariant(self.config.worker.batch_invariant):
            decoder = read_decoder(
                self.folder,
                self.model,
                self.form,
                self.config.model,
                self.dtype,
                self.budget,
                progress,
                self.place.torch_device,
                drafts_itself=self.drafting.drafts_itself,
                divided=None if self.place.ranks is None else Divided(self.whole, self.place.ranks),
            )
        self.same.check()
        return decoder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and all that lives as long as it does."""

    plan: ModelPlan
    budget: MemoryBudget
    """As measured, where the place measures."""
    parts: Parts[RunnableDecoder, KVCache]
    processors: Processors
    saturation: tuple[int, float]
    """From how many tokens on, and from what time, a step does no more of them per second."""
    guides: Guides
    drafter: Drafter | None
    adapters: PreparedAdapters | None
    """None where no adapter is served."""
    tower: "Tower | None"
    """Encodes images, where they are served."""
    moves: TransferEngine | None
    """Moves blocks to the tiers behind the device, if there are any."""

    def fresh_runner(self) -> ModelRunner | CudaRunner:
        """A runner over the parts, which knows no rows.

        Raises:
            ModelLoadError: the proposer of drafts cannot be made.
        """
        decoder, cache, plan = self.parts.decoder, self.parts.cache, self.plan
        speculation: dict[str, Any] = {} if self.drafter is None else self.drafter.speculation(decoder, cache)
        runner = plan.place.make_runner(
            decoder,
            cache,
            max_model_len=self.budget.max_model_len,
            poison=self._poison(cache),
            processors=self.processors,
            activation=plan.activation,
            guides=self.guides.rows(),
            adapters=self._slots(),
            **speculation,
        )
        if self.tower is not None:
            from troupellm.models.media.encoder_cache import EncoderCache

            runner.stages.media = EncoderCache(self.tower)
        return runner

    def ready(self, seconds: float) -> WorkerReady:
        """The report, once the first runner was made. seconds: how long loading took."""
        plan = self.plan
        ready = decoder_ready(
            plan.model,
            self.budget,
            plan.config,
            plan.dtype,
            seconds,
            self.saturation,
            self.processors,
            device=plan.place.torch_device.type,
            pooling=plan.ability,
            fingerprint=plan.same.fingerprint,
            drafter=plan.drafting.needs,
            most_drafts=0 if self.drafter is None else self.drafter.most,
            max_loras=0 if self.adapters is None else plan.config.lora.max_loras,
        )
        if plan.place.ranks is not None:
            ready = msgspec.structs.replace(ready, num_parameters=weight_count(plan.whole))
        ready = ready if self.moves is None else self.moves.described(ready)
        return msgspec.structs.replace(ready, media=self._media_ability())

    @property
    def note(self) -> str:
        """The last note of the load log."""
        return attention_note(self.plan.attention)

    def _media_ability(self) -> MediaAbility | None:
        if self.tower is None:
            return None
        plan, settings = self.plan, self.plan.config.media
        vector = plan.model.hidden_size * plan.dtype.itemsize
        return MediaAbility(
            kinds=("image",),
            cache_vectors=max(1, settings.encoder_cache_bytes // vector),
            step_vectors=settings.max_num_encoder_tokens,
        )

    def _slots(self) -> AdapterSlots | None:
        """Empty adapter slots."""
        if self.adapters is None:
            return None
        lora = self.plan.config.lora
        return AdapterSlots(
            self.plan.model,
            self.adapters.find,
            num_slots=lora.max_loras,
            max_rank=lora.max_lora_rank,
            dtype=self.plan.dtype,
            device=self.plan.place.torch_device,
        )

    def _poison(self, cache: KVCache) -> Poison | None:
        config = self.plan.config
        if config.worker.poison_memory == "off":
            return None
        when_freed = not config.cache.enable_prefix_caching
        return Poison(cache, config.worker.poison_memory, when_freed=when_freed, transfers=self.moves)


def load_model(
    folder: Path, config: EngineConfig, progress: ProgressSink, ranks: Ranks | None = None
) -> LoadedModel | LoadedEncoder:
    """Read the model and take the memory.

    Args:
        ranks: this process has the leader's part of the model.

    Raises:
        ModelLoadError: the checkpoint cannot be served.
        ConfigError: a setting does not fit the model or the machine.
    """
    gpu = find_device(config.worker.device)
    report_compiling(progress, on_cpu=gpu is None)
    reader, config = settle_quantization(folder, open_config(folder, progress), config)
    if is_encoder(reader):
        refuse_for_encoders(config)
        refuse_ranks(ranks, "encoders")
        return LoadedEncoder(folder, reader, config, DTYPES.get(config.model.dtype, torch.float32), progress)
    if gpu is not None:
        refuse_ranks(ranks, "a GPU")
    place = CpuPlace(config, ranks) if gpu is None else GpuPlace(gpu, config)
    plan = ModelPlan.of(folder, reader, config, place, progress)
    if ranks is not None:
        if plan.media is not None:
            refuse_ranks(ranks, "images (language_model_only serves the text part)")
        ranks.join()
        ranks.tell(Sizes(plan.budget.num_blocks, plan.budget.max_model_len).encode())
    progress(LoadProgress(phase="weights", total=plan.budget.weight_bytes, detail=plan.budget.table()))
    decoder, needs = plan.read(progress), plan.drafting.needs
    tower = _tower(plan, progress)
    budget = place.measured(plan.budget, decoder, plan.cached, drafter=needs)
    if place.on_gpu:
        progress(LoadProgress(phase="kv_cache", detail=budget.table()))
    progress(LoadProgress(phase="kv_cache", total=budget.kv_cache_bytes, detail=quantization_report(decoder)))
    slots = budget.state_slots
    make_cache = partial(place.make_cache, plan.model, budget.num_blocks, plan.cached, needs, state_slots=slots)
    parts = Parts[RunnableDecoder, KVCache](plan.read, make_cache, decoder)
    cache = parts.reserve()
    processors = load_processors(config.worker.logits_processors, plan.model.vocab_size, place.torch_device)
    progress(LoadProgress(phase="warm_up"))
    if ranks is not None:
        ranks.meet()
    _check(decoder, cache, budget)
    saturation = place.warm_up(decoder, cache, budget, plan.ability, progress)
    moves = open_offload(config, cache, plan.same.fingerprint, num_blocks=budget.num_blocks)
    read_tokenizer = partial(load_tokenizer, folder, config.model)
    drafts = plan.drafting.config is not None
    return LoadedModel(
        plan=plan,
        budget=budget,
        parts=parts,
        processors=processors,
        saturation=saturation,
        guides=Guides(read_tokenizer, plan.model.vocab_size, jumps=config.guide.guide_fast_forward),
        drafter=Drafter(plan.drafting, config, folder, plan.dtype, budget.max_model_len) if drafts else None,
        adapters=_prepared_adapters(plan),
        tower=tower,
        moves=moves,
    )


def _tower(plan: ModelPlan, progress: ProgressSink) -> "Tower | None":
    """
    Raises:
        ModelLoadError: the encoder cannot be read.
    """
    if plan.media is None:
        return None
    from troupellm.models.media.tower import read_tower  # which imports transformers

    progress(LoadProgress(phase="weights", detail=f"images are encoded by the tower of {plan.media.architecture}"))
    return read_tower(plan.folder, plan.media, plan.model.hidden_size, plan.dtype, plan.place.torch_device)


def encoder_bytes(folder: Path, config: EngineConfig, dtype: torch.dtype) -> int:
    """Memory that images take beside the decoder: their encoder, and the embeddings that are kept.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    from troupellm.models.media.tower import tower_bytes

    return tower_bytes(folder, dtype) + config.media.encoder_cache_bytes


def _prepared_adapters(plan: ModelPlan) -> PreparedAdapters | None:
    """
    Raises:
        ConfigError: adapters are to have another dtype than activations.
    """
    config, model = plan.config, plan.model
    if not serves_adapters(model, config):
        return None
    if DTYPES.get(config.lora.dtype, plan.dtype) != plan.dtype:
        there = str(plan.dtype).removeprefix("torch.")
        raise ConfigError(f"lora_dtype must be auto or {there}, the dtype of activations", param="lora_dtype")
    form, settings = plan.form, config.model
    base = StoredBase(plan.folder, model, form, settings, plan.dtype) if settings.load_format != "dummy" else None
    on_cpu = not plan.place.on_gpu
    experts = on_cpu and not config.worker.batch_invariant
    return PreparedAdapters(model, config.lora, plan.dtype, base, whole_weights=on_cpu, experts=experts)


def _check(decoder: RunnableDecoder, cache: KVCache, budget: MemoryBudget) -> None:
    """A model that transformers runs shows that it goes with paged attention."""
    if decoder.config.implementation != "transformers":
        return
    from troupellm.models.transformers_backend.decoder import TransformersDecoder
    from troupellm.models.worker.check_transformers import check_decoder

    assert isinstance(decoder, TransformersDecoder)
    check_decoder(decoder, cache, max_model_len=budget.max_model_len)
