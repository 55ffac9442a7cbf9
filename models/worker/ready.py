"""Builds a decoder's `WorkerReady` report once the model is loaded."""

import torch

from troupellm.kernels.kv_quant import cache_dtype
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds
from troupellm.models.memory.plan import MemoryBudget, drafter_block_bytes
from troupellm.models.memory.weight_count import weight_count
from troupellm.models.proposers.paged_attention import lying_in
from troupellm.models.sampling.logits_processors import Processors, describe
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import CacheGroup, WorkerReady
from troupellm.protocol.params.pooling import PoolingAbility


def decoder_ready(
    model: DecoderConfig,
    budget: MemoryBudget,
    config: EngineConfig,
    dtype: torch.dtype,
    seconds: float,
    saturation: tuple[int, float],
    processors: Processors,
    *,
    device: str,
    pooling: PoolingAbility | None,
    fingerprint: str,
    drafter: DrafterNeeds = NO_DRAFTER,
    most_drafts: int = 0,
    max_loras: int = 0,
) -> WorkerReady:
    """
    Args:
        processors: every plug-in that was loaded.
        saturation: from how many tokens on, and from what time, a step does no more of them per second.
        drafter: the drafter's share of the blocks and the memory.
        most_drafts: of a row in a step.
        max_loras: adapter slots.

    Raises:
        ModelLoadError: a default of the logits processors cannot hold.
    """
    cached = cache_dtype(config.cache.kv_cache_dtype, dtype)
    drafted = drafter_block_bytes(drafter, config.cache.block_size, cached)
    return WorkerReady(
        vocab_width=model.vocab_size,
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        block_size=config.cache.block_size,
        groups=_cache_groups(model, budget, drafted),
        step_tokens=config.scheduler.max_num_batched_tokens,
        dtype=str(dtype).removeprefix("torch."),
        cache_dtype=config.cache.kv_cache_dtype,
        quantization=budget.quantization,
        device=device,
        architecture=model.architecture,
        num_parameters=weight_count(model),
        weight_bytes=budget.weight_bytes,
        kv_cache_bytes=budget.kv_cache_bytes,
        activation_bytes=budget.activation_bytes,
        memory_free_bytes=budget.free_bytes,
        load_seconds=seconds,
        saturation_tokens=saturation[0],
        saturation_seconds=saturation[1],
        hidden_size=model.hidden_size if model.layer_inputs is None else 0,
        logits_processors=describe(processors, config.worker.default_logits_processors),
        generates=model.head == "lm" and config.model.runner != "pooling",
        pooling=pooling,
        fingerprint=fingerprint,
        state_slots=budget.state_slots,
        state_bytes=budget.state_bytes,
        most_drafts=most_drafts,
        max_loras=max_loras,
    )


def _cache_groups(model: DecoderConfig, budget: MemoryBudget, drafted: int) -> tuple[CacheGroup, ...]:
    """drafted: bytes of a block that are a drafter's."""
    layout, whole = cache_layout(model), budget.kv_cache_bytes // budget.num_blocks
    return tuple(
        CacheGroup(
            num_layers=layers,
            sliding_window=window,
            kind="latent" if model.mla is not None else "full" if window is None else "sliding",
            block_bytes=round((whole - drafted) * share) + drafted * (group == lying_in(layout)),
        )
        for group, (window, layers, share) in enumerate(
            zip(layout.windows, layout.group_layers, layout.group_shares, strict=True)
        )
    )
