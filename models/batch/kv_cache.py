"""The KV cache: one pair of tensors per layer, in blocks that rows name by number."""

import torch
from torch import Tensor

from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.kernels.kv_quant import as_bytes, row_width
from troupellm.models.batch.state_cache import StateCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.cache_layout import cache_layout

CPU = torch.device("cpu")


class KVCache:
    """Keys and values of all layers, and of a drafter's.

    Attributes:
        layers: per layer (keys, values), each [blocks, kv_heads, block_size, head_dim], or wider where the type needs
            it (see `kernels.kv_quant`); with latent attention it is twice the same tensor. Layers of different cache
            groups may share the memory, not the blocks. A layer with a state has that state's parts here.
        states: those parts; None where the model has no states.
        draft_layers: the same of a drafter; its heads may have other shapes.
        borders: of a drafter that asks for it, what it keeps of each block, float32 [blocks, width]; zeros where
            nothing was kept.
        storages: what holds all this, the model's first: [layers, keys and values, blocks, kv_heads, block_size, width]
            each. A block is its part of all of them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        drafter: DecoderConfig | None = None,
        border: int = 0,
        state_slots: int = 0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Reserve the memory; the system hands it out as it is written to, and nothing is read before that.

        Args:
            drafter: a drafter's layers, stored in the same blocks: copying or moving a block includes their part.
            border: width of `borders`; 0 is none.
            state_slots: of a model with states.
            state_dtype: of the model, and of states that have no other.
        """
        self.layout = cache_layout(config)
        self.num_blocks, self.block_size, self.num_kv_heads = num_blocks, block_size, config.layers[0].num_kv_heads
        self.storage = _reserve(config, num_blocks, block_size, dtype, device)
        self.layers = _pairs(self.storage, config)
        self.states = StateCache(config, state_slots, state_dtype, device) if state_slots else None
        if self.states is not None:
            for layer, parts in self.states.layers.items():
                self.layers[layer] = (parts[0], parts[-1])
        self.storages: tuple[Tensor, ...] = (self.storage,)
        self.draft_layers: list[tuple[Tensor, Tensor]] = []
        if drafter is not None:
            more = _reserve(drafter, num_blocks, block_size, dtype, device)
            self.storages, self.draft_layers = (self.storage, more), _pairs(more, drafter)
        shape = (1, 1, num_blocks if border else 0, 1, 1, border)
        borders = torch.zeros(shape, dtype=torch.float32, device=device)
        self.borders = borders.view(-1, border) if border else None
        self._of_positions = self.storages
        if border:
            self.storages = (*self.storages, borders)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of any group, (source, target) each; all sources are read before any target is written."""
        blocks = torch.tensor(pairs)
        if self.storage.is_cuda:  # from pinned memory, so that the host does not wait
            blocks = blocks.pin_memory().to(self.storage.device, non_blocking=True)
        sources, targets = blocks.T
        for every in self.storages:
            storage = as_bytes(every)
            storage[:, :, targets] = storage[:, :, sources]

    def move(self, sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> None:
        """Copy single positions of blocks, (block, place) each, in all layers; all are read before any is written."""
        device = self.storage.device
        (blocks, places), (new_blocks, new_places) = (
            torch.tensor(pairs, device=device).T for pairs in (sources, targets)
        )
        for every in self._of_positions:
            storage = as_bytes(every)
            storage[:, :, new_blocks, :, new_places] = storage[:, :, blocks, :, places]


def _reserve(
    config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    width = row_width(config.layers[0].head_dim, dtype)
    slots = cache_layout(config).num_slots
    shape = (slots, parts_of(config), num_blocks, config.layers[0].num_kv_heads, block_size, width)
    storage = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        prefer_huge_pages(storage.data_ptr(), storage.nbytes, written=False)
    return storage


def _pairs(storage: Tensor, config: DecoderConfig) -> list[tuple[Tensor, Tensor]]:
    return [(storage[slot, 0], storage[slot, -1]) for slot in cache_layout(config).slot_of]


def parts_of(config: DecoderConfig) -> int:
    """Tensors per layer: keys and values, or one of latent vectors."""
    return 2 if config.mla is None else 1
