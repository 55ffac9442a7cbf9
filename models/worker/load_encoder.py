"""Loads an encoder, which the worker does instead of allocating a cache."""

from functools import partial
from pathlib import Path
from typing import Final

import torch

from troupellm.models.checkpoint.safetensors import Checkpoint, RandomWeights
from troupellm.models.config.encoder_config import (
    BERT,
    BY_TRANSFORMERS,
    DISTILBERT,
    ENCODERS,
    ROBERTA,
    EncoderConfig,
    describe_encoder,
)
from troupellm.models.config.hf_config import ConfigReader, architecture_of
from troupellm.models.config.pooling_config import (
    classifier_ability,
    dense_modules,
    embedding_ability,
    max_sequence_length,
)
from troupellm.models.layers.encoder import Encoder, RunnableEncoder
from troupellm.models.layers.pooled_dense import PooledDense
from troupellm.models.load.fingerprint import SameModel
from troupellm.models.load.weight_state import weight_state
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.processes.process_limits import available_memory
from troupellm.models.runner.encoder_runner import EncoderRunner
from troupellm.models.worker.sleep import Parts
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import (
    CacheGroup,
    LoadProgress,
    NewRow,
    ProgressSink,
    SamplingState,
    StepPlan,
    WorkerReady,
)
from troupellm.protocol.params.pooling import PoolingAbility, PoolingParams

_PREFIXES = {BERT: "bert.", ROBERTA: "roberta.", DISTILBERT: "distilbert."}
_TRAINING_HEADS = ("cls.", "lm_head.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


class LoadedEncoder:
    """An encoder and its report: `LoadedModel` without what only decoders have."""

    guides: Final = None
    drafter: Final = None
    moves: Final = None
    note: Final = "attention: bidirectional, no KV cache"

    def __init__(
        self, folder: Path, reader: ConfigReader, config: EngineConfig, dtype: torch.dtype, progress: ProgressSink
    ) -> None:
        """Read the checkpoint.

        Raises:
            ModelLoadError: it cannot be served.
            ConfigError: a setting does not fit the model.
        """
        model = _describe(folder, reader)
        if config.model.runner == "generate" or config.model.convert == "none":
            raise ConfigError(f"{model.architecture} does not generate text", param="runner")
        self._max_len = _max_length(folder, model, config)
        self._ability = _ability(folder, reader, model, config)
        self._model, self._config, self._dtype = model, config, dtype
        dense = () if model.labels else dense_modules(folder)
        self._projection = PooledDense(folder, dense, model.hidden_size) if dense else None
        self.weight_bytes = model.num_weights * dtype.itemsize
        self._budget = self._plan_memory()
        progress(LoadProgress(phase="weights", total=self.weight_bytes, detail=self._budget.table()))
        same = SameModel(None, partial(weight_state, folder, config.model))

        def read(sink: ProgressSink) -> RunnableEncoder:
            encoder = _read(folder, model, config, dtype, sink, self.weight_bytes)
            same.check()
            return encoder

        self.parts = Parts[RunnableEncoder, tuple[()]](read, lambda: ())
        self.parts.read(progress)
        self.parts.reserve()
        progress(LoadProgress(phase="warm_up"))
        self._warm_up(self.fresh_runner())

    def fresh_runner(self) -> EncoderRunner:
        """A runner over the same weights, which knows no rows."""
        return EncoderRunner(self.parts.decoder, max_model_len=self._max_len, projection=self._projection)

    def ready(self, seconds: float) -> WorkerReady:
        """`seconds`: how long loading took."""
        model, budget = self._model, self._budget
        return WorkerReady(
            vocab_width=model.vocab_size,
            max_model_len=self._max_len,
            num_blocks=budget.num_blocks,
            block_size=self._max_len,
            groups=(CacheGroup(num_layers=model.num_layers),),
            dtype=str(self._dtype).removeprefix("torch."),
            device="cpu",
            architecture=model.architecture,
            num_parameters=model.num_weights,
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=0,
            activation_bytes=budget.activation_bytes,
            memory_free_bytes=budget.free_bytes,
            load_seconds=seconds,
            generates=False,
            pooling=self._ability,
            whole_prompts=True,
        )

    def _plan_memory(self) -> MemoryBudget:
        """
        Raises:
            ConfigError: the weights do not fit.
        """
        model, scheduler = self._model, self._config.scheduler
        activations = scheduler.max_num_batched_tokens * self._dtype.itemsize
        activations *= 8 * model.hidden_size + 2 * model.intermediate_size
        free = available_memory() - self.weight_bytes - activations
        if free < 0:
            raise ConfigError(
                f"weights of {self.weight_bytes} bytes and steps that take {activations} do not fit the memory",
                param="max_num_batched_tokens",
            )
        return MemoryBudget(
            weight_bytes=self.weight_bytes,
            activation_bytes=activations,
            kv_cache_bytes=0,
            free_bytes=free,
            # A block stands for a prompt and for no memory; those whose plan has not come back count beside the others.
            num_blocks=3 * scheduler.max_num_seqs + 3,
            max_model_len=self._max_len,
        )

    def _warm_up(self, runner: EncoderRunner) -> None:
        state, length = self._ability.resolve(PoolingParams()), min(4, self._max_len)
        row = NewRow(
            row=0,
            epoch=0,
            request_id="",
            token_ids=bytes(4 * length),
            num_prompt_tokens=length,
            sampling=SamplingState(temperature=0.0),
            blocks=((0,),),
            pooling=state,
        )
        runner.run(
            StepPlan(step=0, engine_epoch=0, rows=(0,), epochs=(0,), starts=(0,), counts=(length,), new_rows=(row,))
        )


def _max_length(folder: Path, model: EncoderConfig, config: EngineConfig) -> int:
    """A prompt is computed in one step, so a step bounds it too."""
    most, own = model.max_length, max_sequence_length(folder)
    wanted, step = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    if wanted == "auto":
        return min(most, step, own or most)
    if wanted > most:
        raise ConfigError(f"max_model_len {wanted} is beyond the model's own limit of {most}", param="max_model_len")
    if wanted > step:
        raise ConfigError(
            f"max_num_batched_tokens must be at least max_model_len ({wanted}): the model reads whole prompts",
            param="max_num_batched_tokens",
        )
    return wanted


def _describe(folder: Path, reader: ConfigReader) -> EncoderConfig:
    if architecture_of(reader) in ENCODERS:
        return describe_encoder(reader)
    from troupellm.models.transformers_backend.encoder import describe_other_encoder

    return describe_other_encoder(folder, reader)


def _ability(folder: Path, reader: ConfigReader, model: EncoderConfig, config: EngineConfig) -> PoolingAbility:
    if model.labels:
        return classifier_ability(
            config.model, hidden_size=model.hidden_size, pooling_type=model.pooling_type, labels=model.labels
        )
    return embedding_ability(folder, reader, config.model, hidden_size=model.hidden_size, default="CLS", projects=True)


def _read(
    folder: Path, model: EncoderConfig, config: EngineConfig, dtype: torch.dtype, progress: ProgressSink, total: int
) -> RunnableEncoder:
    if model.family == BY_TRANSFORMERS:
        return _read_other(folder, model, config, dtype, progress, total)
    if config.model.load_format == "dummy":
        return Encoder(model, RandomWeights(dtype, seed=config.model.seed))
    done = 0

    def taken(size: int) -> None:
        nonlocal done
        done += size
        progress(LoadProgress(phase="weights", done=min(done, total), total=total))

    checkpoint = Checkpoint(folder, dtype, taken)
    prefix = _PREFIXES[model.family]
    if not checkpoint.has(f"{prefix}embeddings.word_embeddings.weight"):  # saved without a head
        prefix = ""
    encoder = Encoder(model, checkpoint, prefix=prefix)
    for name in _BUFFERS:
        checkpoint.ignore(prefix + name)
    if not model.labels:
        checkpoint.ignore_all(f"{prefix}pooler.")
    if model.masked_lm:
        for name in _TRAINING_HEADS:
            checkpoint.ignore_all(name)
    checkpoint.finish()
    return encoder


def _read_other(
    folder: Path, model: EncoderConfig, config: EngineConfig, dtype: torch.dtype, progress: ProgressSink, total: int
) -> RunnableEncoder:
    from troupellm.models.transformers_backend.encoder import TransformersEncoder, read_encoder

    dummy = config.model.load_format == "dummy"
    network = read_encoder(folder, model, dtype, dummy=dummy, seed=config.model.seed)
    detail = f"{model.architecture} runs by the code of transformers"
    progress(LoadProgress(phase="weights", done=total, total=total, detail=detail))
    return TransformersEncoder(model, network)


def refuse_for_encoders(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: a setting that only decoders know.
    """
    worker, unused = (
        config.worker,
        {
            "batch_invariant": config.worker.batch_invariant,
            "quantization": config.model.quantization is not None,
            "attention_backend": config.worker.attention_backend != "auto",
            "kv_cache_dtype": config.cache.kv_cache_dtype != "auto",
            "kv_offloading_size": config.offload.on,
            "speculative_config": config.speculation.speculative_config is not None,
        },
    )
    if worker.device == "cuda":
        raise ConfigError("device cuda is for decoders; this model is an encoder: use cpu", param="device")
    for name, is_given in unused.items():
        if is_given:
            raise ConfigError(f"{name} is for decoders; this model is an encoder", param=name)
