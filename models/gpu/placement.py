"""A GPU as the place of a model: chooses the dtype, measures memory, and builds cache and runner."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.common.triton import installed
from troupellm.kernels.common.triton_probe import launch_error
from troupellm.kernels.mla_attention import expanding_tokens
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.backends import Planner
from troupellm.kernels.paged_attention.tree import TreeMask
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gpu.batch import DeviceSpans, GroupPlanner, triton_planner
from troupellm.models.gpu.device import CudaDevice, Device
from troupellm.models.gpu.graph_dispatch import Dispatcher, default_sizes, useful_sizes
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.gpu.sampling_tensors import WIDTH
from troupellm.models.gpu.warm_up import warmed
from troupellm.models.kv_offload.gpu_mover import MOST_BLOCKS
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.cache_layout import View, cache_layout
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds
from troupellm.models.memory.plan import MemoryBudget, drawn_tokens, whole_block_bytes
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.runner.placement import DTYPES
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.cache_groups import count_blocks, longest_sequence
from troupellm.protocol.messages.worker import NewRow, ProgressSink, SamplingState, StepPlan
from troupellm.protocol.params.pooling import PoolingAbility

GRAPH_BYTES = 512 * 2**20
"""Memory reserved for graphs, apart from their outputs, and for later allocations of libraries."""


def find_device(wanted: str) -> CudaDevice | None:
    """The GPU to compute on; None is the CPU.

    Args:
        wanted: auto, cpu or cuda.

    Raises:
        ConfigError: cuda is asked for, and there is none; or there is one that Triton's kernels cannot be launched on.
    """
    if wanted == "cpu":
        return None
    if torch.cuda.is_available():
        device = CudaDevice()
        if installed() and (error := launch_error(device.torch_device)):
            raise ConfigError(
                f"device cuda cannot be used: Triton launches no kernel ({error}); it needs a C compiler (gcc, or CC) "
                "and Python's headers (python3-dev), or use --device cpu",
                param="device",
            )
        return device
    if wanted == "cuda":
        built = "there is no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
        raise ConfigError(f"device cuda cannot be used: {built}; use cpu or auto", param="device")
    return None


class GpuPlace:
    """One GPU for one model."""

    on_gpu = True
    ranks: Ranks | None = None
    """A model on GPUs has one."""

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self.device, self.torch_device, self._config = device, device.torch_device, config
        _, self._total = device.memory()

    def dtype(self, model: DecoderConfig) -> torch.dtype:
        """The dtype to compute in: the configured one, or the checkpoint's.

        Raises:
            ConfigError: this model is not served from a GPU.
        """
        if model.implementation == "transformers":
            raise ConfigError("device cuda does not go with model_impl transformers yet; use cpu", param="device")
        wanted = self._config.model.dtype
        return DTYPES[model.checkpoint_dtype if wanted == "auto" else wanted]

    def available(self) -> int:
        """Bytes that may be used: the share --gpu-memory-utilization, less the memory that other processes use."""
        share = self._config.cache.gpu_memory_utilization
        return max(0, int(self._total * share) - (self._total - self.device.memory()[0]))

    def make_cache(
        self,
        model: DecoderConfig,
        num_blocks: int,
        dtype: torch.dtype,
        drafter: DrafterNeeds = NO_DRAFTER,
        state_slots: int = 0,
    ) -> KVCache:
        """Make the cache with one more block than plans may name: the null page of padding rows."""
        return KVCache(
            model,
            num_blocks + 1,
            self._config.cache.block_size,
            dtype,
            self.device.torch_device,
            drafter=drafter.layers,
            border=drafter.border,
            state_slots=state_slots,
            state_dtype=self.dtype(model),
        )

    def make_runner(
        self, decoder: RunnableDecoder, cache: KVCache, max_model_len: int, *, captures: bool = True, **more: Any
    ) -> CudaRunner:
        """
        Args:
            captures: False makes a runner without graphs, regardless of the settings.
            more: as of `CudaRunner`.
        """
        config, kv_dtype = self._config, cache.storage.dtype
        attention = self._attention(decoder, kv_dtype)
        plan, sizes = host_planner(attention), tuple[int, ...]()
        if attention.backend.name == "triton":
            plan = triton_planner(decoder.config, cache.block_size, kv_dtype, invariant=decoder.batch_invariant)
            # A step without a head, of a classifier, gives no tokens that a graph could append.
            sizes = self._sizes() if captures and decoder.head is not None else ()
        return CudaRunner(
            decoder,
            cache,
            self.device,
            max_model_len=max_model_len,
            slots=config.scheduler.max_num_seqs,
            plan=plan,
            capture_sizes=sizes,
            **more,
        )

    def warm_up(
        self,
        decoder: RunnableDecoder,
        cache: KVCache,
        budget: MemoryBudget,
        ability: PoolingAbility | None,
        progress: ProgressSink,
    ) -> tuple[int, float]:
        """As `warm_up.warmed`. Nothing of the cache counts yet."""
        spare = self.make_runner(decoder, cache, budget.max_model_len, captures=False)
        return warmed(spare, ability, self._config, budget, progress)

    def _attention(self, decoder: RunnableDecoder, kv_dtype: torch.dtype) -> Planner:
        return plan_attention(
            decoder.config,
            self._config.cache.block_size,
            decoder.dtype,
            backend=self._config.worker.attention_backend,
            device=self.device.torch_device,
            kv_dtype=kv_dtype,
            batch_invariant=decoder.batch_invariant,
        )

    def _sizes(self) -> tuple[int, ...]:
        worker, most = self._config.worker, self._config.scheduler.max_num_seqs
        if worker.enforce_eager:
            return ()
        return useful_sizes(worker.cudagraph_capture_sizes, most) or default_sizes(most)

    def _graph_bytes(self, decoder: RunnableDecoder, kv_dtype: torch.dtype, drafter: DrafterNeeds) -> int:
        """Memory of `DecodeGraphs` that graphs read and write outside of their own memory pool, and the shared working
        memory of graphs that draw from the likeliest tokens."""
        sizes = self._sizes()
        if not sizes or self._attention(decoder, kv_dtype).backend.name != "triton":
            return 0
        speculative = self._config.speculation.speculative_config
        drafts = 0 if speculative is None else speculative.most_drafts
        rows = max(*sizes, Dispatcher(sizes, queries=(1, 1 + drafts)).most_tokens)
        angles = decoder.angle_table  # made for graphs alone, by the first of them at the latest
        token = 4 * decoder.config.vocab_size + drafter.shown * decoder.dtype.itemsize
        drawing = 0
        if speculative is None:  # else no graph draws
            from troupellm.kernels.sampling.triton_truncate import row_bytes

            drawing = max(sizes) * row_bytes(decoder.config.vocab_size)
        return rows * token + 8 * 2 * WIDTH * max(sizes) + (0 if angles is None else angles.nbytes) + drawing

    def measured(
        self,
        budget: MemoryBudget,
        decoder: RunnableDecoder,
        kv_dtype: torch.dtype,
        reset_peak: Callable[[], None] = torch.cuda.reset_peak_memory_stats,
        peak: Callable[[], int] = torch.cuda.max_memory_allocated,
        drafter: DrafterNeeds = NO_DRAFTER,
    ) -> MemoryBudget:
        """The budget once more, now that the weights are there and a step as large as any was computed.

        Raises:
            ConfigError: the remaining memory does not hold the requested context; `param` names the setting.
        """
        model, config = decoder.config, self._config
        block = whole_block_bytes(model, drafter, config.cache.block_size, kv_dtype)
        used = self._total - self.device.memory()[0] + drafter.weight_bytes  # which are read later
        activations = self._profile(budget, decoder, kv_dtype, reset_peak, peak) + drafter.activation_bytes
        activations += config.scheduler.max_num_seqs * drafter.row_bytes(decoder.dtype.itemsize)
        activations += self._graph_bytes(decoder, kv_dtype, drafter)
        activations += MOST_BLOCKS * block if config.offload.host_bytes else 0
        state = 4 * config.scheduler.max_num_seqs * (budget.max_model_len + budget.max_model_len // 8)
        state += budget.adapter_bytes
        room = int(self._total * config.cache.gpu_memory_utilization) - used - activations - state - GRAPH_BYTES
        windows, span = cache_layout(model).windows, config.scheduler.max_num_batched_tokens
        longest = count_blocks(windows, budget.max_model_len, span, config.cache.block_size)
        blocks = budget.num_blocks
        if config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None:
            blocks = min(room // block, config.scheduler.max_num_seqs * longest)
        held = longest_sequence(windows, blocks, span, config.cache.block_size) if blocks > 0 else 0
        least = budget.max_model_len if isinstance(config.model.max_model_len, int) else 1
        if held < least or blocks * block > room + GRAPH_BYTES:
            raise ConfigError(
                f"weights and activations leave {max(room, 0)} bytes to the KV cache, which holds {held} tokens in "
                "them; lower max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization",
                param="gpu_memory_utilization",
            )
        return msgspec.structs.replace(
            budget,
            activation_bytes=activations,
            num_blocks=blocks,
            kv_cache_bytes=blocks * block,
            free_bytes=max(0, room - blocks * block),
            concurrency=blocks / longest,
            max_model_len=min(held, budget.max_model_len),
        )

    def _profile(
        self,
        budget: MemoryBudget,
        decoder: RunnableDecoder,
        kv_dtype: torch.dtype,
        reset_peak: Callable[[], None],
        peak: Callable[[], int],
    ) -> int:
        """Bytes that the largest step takes beside weights and cache."""
        if decoder.head is None:
            return budget.activation_bytes
        config, size = self._config, self._config.cache.block_size
        tokens = config.scheduler.max_num_batched_tokens
        length = min(tokens, budget.max_model_len)
        if (mla := decoder.config.mla) is not None:  # tokens of short prompts take more: their queries are absorbed
            length = min(length, expanding_tokens(mla.plain, mla.value, mla.latent, mla.rotated) - 1)
        counts = [length] * (tokens // length) + [tokens % length] * bool(tokens % length)
        width = -(-length // size)
        cache = self.make_cache(decoder.config, width, kv_dtype)
        runner = self.make_runner(decoder, cache, budget.max_model_len, captures=False)
        reset_peak()
        before = peak()
        new = tuple(
            NewRow(
                row=row,
                epoch=0,
                request_id="",
                token_ids=bytes(4 * count),
                num_prompt_tokens=count,
                sampling=SamplingState(temperature=1.0, top_p=0.9),
                blocks=(tuple(range(width)),) * runner.rows.num_groups,
            )
            for row, count in enumerate(counts)
        )
        rows = tuple(range(len(counts)))
        plan = StepPlan(
            step=0,
            engine_epoch=0,
            rows=rows,
            epochs=(0,) * len(rows),
            starts=(0,) * len(rows),
            counts=tuple(counts),
            new_rows=new,
        )
        runner.run(plan)
        sampled = 4 * drawn_tokens(config) * decoder.config.vocab_size * 4
        return max(0, peak() - before) + sampled


def host_planner(planner: Planner) -> GroupPlanner:
    """A planner for back ends that plan on the host: it waits for the device, so no graph can contain it."""

    def plan(tables: Tensor, spans: DeviceSpans, view: View) -> Plan:
        window, own = view.window, planner.with_heads(*msgspec.structs.astuple(view.heads))
        parts = (spans.starts, spans.stops, spans.context_lens)
        starts, stops, lens = (part.cpu().numpy().astype(np.int64) for part in parts)
        order = np.argsort(starts)
        counts, tree = (stops - starts)[order], None
        if spans.trees is not None:
            there = spans.trees[window]
            bases, nodes, positions = (part.cpu().numpy() for part in (there.bases, there.nodes, there.positions))
            tree = TreeMask(bases.astype(np.int64)[order], nodes.view(np.uint64), positions.astype(np.int64))
        found: Plan = own(tables.cpu().numpy()[order], lens[order] - counts, counts, window, tree)
        return found

    return plan
