"""A CPU as the place of a model: the counterpart of `GpuPlace`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from troupellm.kernels import paged_attention
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.kv_offload.host_memory import memory_left
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.parallel.decoder import LeadingCache
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.runner.leading import LeadingRunner
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.runner.warm_up import warmed
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import ProgressSink
from troupellm.protocol.params.pooling import PoolingAbility

DTYPES: Final = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""By the setting; there is none for auto."""


class CpuPlace:
    """This machine's processor and memory for one model."""

    on_gpu = False
    torch_device = torch.device("cpu")

    def __init__(self, config: EngineConfig, ranks: Ranks | None = None) -> None:
        """ranks: of this model; None where this process has all of it."""
        self._config, self.ranks = config, ranks

    def dtype(self, model: DecoderConfig) -> torch.dtype:
        """The dtype to compute in: the configured one, else float32, also where the checkpoint has another."""
        return DTYPES.get(self._config.model.dtype, torch.float32)

    def available(self) -> int | None:
        """As `memory_left`; of several ranks, the leader's part. The others take as much as it tells them."""
        left = memory_left(self._config)
        return left if left is None or self.ranks is None or self.ranks.number else left // self.ranks.size

    def make_cache(
        self,
        model: DecoderConfig,
        num_blocks: int,
        dtype: torch.dtype,
        drafter: DrafterNeeds = NO_DRAFTER,
        state_slots: int = 0,
    ) -> KVCache:
        """Reserve the cache's memory."""
        make: Callable[..., KVCache] = (
            KVCache if self.ranks is None or self.ranks.number else partial(LeadingCache, self.ranks)
        )
        return make(
            model,
            num_blocks,
            self._config.cache.block_size,
            dtype,
            drafter=drafter.layers,
            border=drafter.border,
            state_slots=state_slots,
            state_dtype=self.dtype(model),
        )

    def measured(
        self, budget: MemoryBudget, decoder: RunnableDecoder, kv_dtype: torch.dtype, drafter: DrafterNeeds = NO_DRAFTER
    ) -> MemoryBudget:
        """The budget once more, now that the weights are there: the planned one."""
        return budget

    def make_runner(self, decoder: RunnableDecoder, cache: KVCache, max_model_len: int, **more: Any) -> ModelRunner:
        """more: as of `ModelRunner`."""
        backend = self._config.worker.attention_backend
        make: Callable[..., ModelRunner] = ModelRunner if self.ranks is None else partial(LeadingRunner, self.ranks)
        return make(decoder, cache, max_model_len=max_model_len, attention_backend=backend, **more)

    def warm_up(
        self,
        decoder: RunnableDecoder,
        cache: KVCache,
        budget: MemoryBudget,
        ability: PoolingAbility | None,
        progress: ProgressSink,
    ) -> tuple[int, float]:
        """As `warm_up.warmed`. Nothing of the cache counts yet."""
        paged_attention.prepare()
        return warmed(self.make_runner(decoder, cache, budget.max_model_len), ability, self._config, budget)
