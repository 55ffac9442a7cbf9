"""The memory budget of a worker, computed before any memory is taken."""

import msgspec
import torch

from troupellm.kernels.kv_quant import cache_dtype, row_width
from troupellm.models.adapters.sites import adapter_bytes
from troupellm.models.batch.kv_cache import parts_of
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds
from troupellm.models.memory.state_room import state_room
from troupellm.models.memory.stored_size import StoredSize
from troupellm.models.memory.weight_bytes import weight_bytes
from troupellm.models.memory.weight_count import weight_count
from troupellm.models.processes.process_limits import available_memory
from troupellm.protocol.config.engine import CacheConfig, EngineConfig
from troupellm.protocol.config.setting_types import on_load_mode
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.cache_groups import count_blocks, longest_sequence

CPU = torch.device("cpu")
CPU_KV_LIMIT = 4 * 2**30
"""Most bytes of a CPU's memory that the KV cache takes without an explicit setting."""
CPU_KV_SHARE = 0.5
"""Share of the memory that weights and activations leave."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, and the numbers that follow from them."""

    weight_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    adapter_bytes: int = 0
    """Of adapter slots."""
    free_bytes: int
    """Available memory that stays unused."""
    state_bytes: int = 0
    """Of one state, where the model has states."""
    state_rows: int = 0
    """States that running sequences may have."""
    state_snapshots: int = 0
    """Further states, of prefixes."""
    num_blocks: int
    max_model_len: int
    concurrency: float = 0.0
    """The number of sequences of `max_model_len` tokens that the KV cache has room for."""
    quantization: str = ""
    """Quantization of the weights, made on load or stored."""
    num_parameters: int = 0
    active_parameters: int = 0
    """Parameters that one token goes through, where that is not all of them."""

    @property
    def state_slots(self) -> int:
        """All states that there is room for."""
        return self.state_rows + self.state_snapshots

    def table(self) -> str:
        """One line per use, for the start-up log."""
        total, active = self.num_parameters, self.active_parameters
        context = f"{self.num_blocks} blocks, {self.concurrency:.1f} x context {self.max_model_len}"
        sparse = f"  {total / 1e9:.2f} B parameters, {active / 1e9:.2f} B of them per token" if active < total else ""
        lines = [
            ("weights", self.weight_bytes, f"  {self.quantization}" * bool(self.quantization) + sparse),
            ("activations", self.activation_bytes, ""),
            *([("adapters", self.adapter_bytes, "")] if self.adapter_bytes else ()),
            ("KV cache", self.kv_cache_bytes, f"  {context}"),
            *self._state_lines(),
            ("left free", self.free_bytes, ""),
        ]
        return "\n".join(f"{name:<12} {size / 2**20:>9,.0f} MiB{note}" for name, size, note in lines)

    def _state_lines(self) -> tuple[tuple[str, int, str], ...]:
        size = self.state_bytes
        if not size:
            return ()
        return (
            ("states", self.state_rows * size, f"  {self.state_rows} rows, {size:,} bytes each"),
            ("snapshots", self.state_snapshots * size, f"  {self.state_snapshots} prefixes"),
        )


def plan_memory(
    model: DecoderConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    available: int | None = None,
    stored: StoredSize | None = None,
    *,
    device: torch.device = CPU,
    on_gpu: bool = False,
    drafter: DrafterNeeds = NO_DRAFTER,
) -> MemoryBudget:
    """Divide the available memory.

    Args:
        available: bytes; measured when not given.
        stored: of a quantized checkpoint.
        device: where products are computed.
        on_gpu: the cache may take all that is left; on a CPU others live, too.
        drafter: the memory needs of speculative decoding beside the model.

    Raises:
        ConfigError: the wanted context or cache does not fit; `param` names the setting.
    """
    available = available_memory() if available is None else available
    size = dtype.itemsize
    mode = on_load_mode(config.model.quantization)
    weights = weight_bytes(model, dtype, device, mode, stored) + drafter.weight_bytes
    activations = _activation_bytes(model, config, size) + drafter.activation_bytes
    activations += config.scheduler.max_num_seqs * drafter.row_bytes(size)
    adapters = slot_bytes(model, config, dtype)
    longest = model_limit(model, config)
    cells = cache_dtype(config.cache.kv_cache_dtype, dtype)
    check_cells(model, config.cache.kv_cache_dtype, cells)
    check_chunks(model, config.cache.block_size, on_gpu=on_gpu)
    block = whole_block_bytes(model, drafter, config.cache.block_size, cells)
    windows, span = cache_layout(model).windows, config.scheduler.max_num_batched_tokens
    used = weights + activations + adapters
    states = state_room(model, config, dtype, available - used)
    used += states.reserved
    most = count_blocks(windows, longest, span, config.cache.block_size)
    room = states.left_for_blocks(available - used)
    num_blocks = _num_blocks(config.cache, block, room, most, config, on_gpu=on_gpu)
    snapshots = states.snapshots(num_blocks, num_blocks * block)
    held = longest_sequence(windows, num_blocks, span, config.cache.block_size)
    if isinstance(config.model.max_model_len, int) and held < longest:
        raise ConfigError(
            f"max_model_len {longest} does not fit the KV cache, which holds {held} tokens; "
            f"lower it or raise kv_cache_memory_bytes to {most * block}",
            param="max_model_len",
        )
    return MemoryBudget(
        weight_bytes=weights,
        quantization=mode or ("" if stored is None else stored.method),
        activation_bytes=activations,
        kv_cache_bytes=num_blocks * block,
        adapter_bytes=adapters,
        free_bytes=max(0, available - used + (states.asked or 0) - num_blocks * block - snapshots * states.size),
        state_bytes=states.size,
        state_rows=states.rows,
        state_snapshots=snapshots,
        num_blocks=num_blocks,
        max_model_len=min(longest, held),
        concurrency=num_blocks / max(1, count_blocks(windows, min(longest, held), span, config.cache.block_size)),
        num_parameters=weight_count(model),
        active_parameters=weight_count(model, active=True),
    )


def slot_bytes(model: DecoderConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of all adapter slots; 0 where none is served."""
    if not serves_adapters(model, config):
        return 0
    return config.lora.max_loras * adapter_bytes(model, config.lora.max_lora_rank, dtype.itemsize)


def serves_adapters(model: DecoderConfig, config: EngineConfig) -> bool:
    """True if adapters are asked for, and the decoder is one of our own."""
    return config.lora.enabled and model.implementation == "troupellm"


def block_bytes(model: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values in all slots, in a cache of `dtype`."""
    rows = sum(
        store.num_slots * store.num_kv_heads * row_width(store.head_dim, dtype) for store in cache_layout(model).stores
    )
    return parts_of(model) * rows * block_size * dtype.itemsize


def check_cells(model: DecoderConfig, name: str, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: layers whose heads differ share blocks, which rows of that type do not fill alike.
    """
    layout = cache_layout(model)
    for place, number in zip(layout.place_of, layout.view_of, strict=True):
        store, view = layout.stores[place.store], layout.views[number]
        own = view.stride * view.heads.num_kv_heads * row_width(view.heads.head_dim, dtype)
        if own != store.num_kv_heads * row_width(store.head_dim, dtype):
            raise ConfigError(
                f"kv_cache_dtype {name} has a scale beside every head, and heads of {view.heads.head_dim} and "
                f"{store.head_dim} numbers share blocks here; use fp8 or auto, or disable_hybrid_kv_cache_manager",
                param="kv_cache_dtype",
            )


def check_chunks(model: DecoderConfig, block_size: int, *, on_gpu: bool) -> None:
    """
    Raises:
        ConfigError: tokens see those of their chunk alone, on a GPU or in chunks that blocks do not fill.
    """
    for chunk in dict.fromkeys(shape.chunk for shape in model.layers if shape.chunk is not None):
        if on_gpu:
            raise ConfigError(
                f"max_model_len must be at most {chunk} on a GPU: beyond, the model attends in chunks of that length, "
                "which is computed on a CPU alone",
                param="max_model_len",
            )
        if chunk % block_size:
            raise ConfigError(
                f"block_size {block_size} does not divide the {chunk} positions of the model's chunks of attention",
                param="block_size",
            )


def whole_block_bytes(model: DecoderConfig, drafter: DrafterNeeds, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block, the drafter's part included."""
    return block_bytes(model, block_size, dtype) + drafter_block_bytes(drafter, block_size, dtype)


def drafter_block_bytes(drafter: DrafterNeeds, block_size: int, dtype: torch.dtype) -> int:
    """A drafter's part of a block."""
    return drafter.block_bytes(0 if drafter.layers is None else block_bytes(drafter.layers, block_size, dtype))


def _activation_bytes(model: DecoderConfig, config: EngineConfig, itemsize: int) -> int:
    """Peak activation memory of a full step, plus the logits of all rows and the sampler's copies of them."""
    heads = max(shape.query_width + 2 * shape.key_width for shape in model.layers)
    widest = max(shape.intermediate_size for shape in model.layers)
    width = 4 * model.hidden_size + max(3 * widest, 3 * heads)
    if (moe := model.experts) is not None:  # each token as often as it has experts, before, between and behind them
        width += moe.top_k * 3 * (model.hidden_size + moe.intermediate_size) + 3 * moe.shared_size
    if (inputs := model.layer_inputs) is not None:  # from a table, from the embeddings, and their sum
        width += 3 * model.num_layers * inputs.size
    tokens = config.scheduler.max_num_batched_tokens
    return tokens * width * itemsize + drawn_tokens(config) * model.vocab_size * 4 * 3


def drawn_tokens(config: EngineConfig) -> int:
    """Rows of logits that one step has at most."""
    rows, speculative = config.scheduler.max_num_seqs, config.speculation.speculative_config
    if speculative is None:
        return rows
    # A token is drawn behind each draft, too.
    return min(config.scheduler.max_num_batched_tokens, rows * (1 + speculative.most_drafts))


def own_limit(model: DecoderConfig) -> int:
    """The context of a model. Cards of models with YaRN say which factor to put in, and nothing of the other number.
    It never exceeds `sparse_keys`, beyond which a token would see too many keys."""
    stretched = (int(rope.original_max_position * rope.factor) for rope in model.ropes if rope.kind == "yarn")
    longest = max((model.max_position_embeddings, *stretched))
    return longest if model.sparse_keys is None else min(longest, model.sparse_keys)


def model_limit(model: DecoderConfig, config: EngineConfig) -> int:
    """The context asked for, or the model's own."""
    wanted, own = config.model.max_model_len, own_limit(model)
    if wanted == "auto":
        return own
    stretched = [rope.factor for rope in model.ropes if rope.kind in ("linear", "dynamic")]
    most = own if model.sparse_keys is not None else int(own * max(stretched, default=1.0))
    if wanted > most:
        raise ConfigError(f"max_model_len {wanted} is beyond the model's own limit of {most}", param="max_model_len")
    return wanted


def _num_blocks(cache: CacheConfig, block: int, room: int, most: int, config: EngineConfig, *, on_gpu: bool) -> int:
    """most: blocks of one sequence."""
    if cache.num_gpu_blocks_override is not None:
        wanted, param = cache.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif cache.kv_cache_memory_bytes is not None:
        wanted, param = cache.kv_cache_memory_bytes // block, "kv_cache_memory_bytes"
    else:
        useful = config.scheduler.max_num_seqs * most
        share = min(CPU_KV_SHARE, cache.gpu_memory_utilization)
        fits = room // block if on_gpu else min(CPU_KV_LIMIT // block, int(room * share) // block)
        wanted, param = min(useful, fits), "max_num_batched_tokens"
    if wanted < 1:
        raise ConfigError(f"there is no room for one KV block of {block} bytes", param=param)
    if wanted * block > room:
        raise ConfigError(
            f"a KV cache of {wanted * block} bytes does not fit: {max(room, 0)} bytes are free beside the weights",
            param=param,
        )
    return wanted
