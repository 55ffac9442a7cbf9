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
            groups may share the memory, not the blocks. A block id times the `stride` of the layer's view is its block.
            A layer with a state has that state's parts here.
        states: those parts; None where the model has no states.
        draft_layers: the same of a drafter; its heads may have other shapes.
        borders: of a drafter that asks for it, what it keeps of each block, float32 [blocks, width]; zeros where
            nothing was kept.
        storage: the first of the model's, or the only one.
        storages: what holds all this, the model's first: [slots, keys and values, blocks, kv_heads, block_size, width]
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
        self.num_blocks, self.block_size = num_blocks, block_size
        self.model_storages = _reserve(config, num_blocks, block_size, dtype, device)
        self.storage, self._pairs = self.model_storages[0], _pairs(self.model_storages, config)
        self.layers = list(self._pairs)
        self.states = StateCache(config, state_slots, state_dtype, device) if state_slots else None
        if self.states is not None:
            for layer, parts in self.states.layers.items():
                self.layers[layer] = (parts[0], parts[-1])
        self.storages = self.model_storages
        self.draft_layers: list[tuple[Tensor, Tensor]] = []
        if drafter is not None:
            more = _reserve(drafter, num_blocks, block_size, dtype, device)
            self.storages, self.draft_layers = (*self.storages, *more), _pairs(more, drafter)
        shape = (1, 1, num_blocks if border else 0, 1, 1, border)
        borders = torch.zeros(shape, dtype=torch.float32, device=device)
        self.borders = borders.view(-1, border) if border else None
        pieces = [(storage.flatten(0, 1), 1) for storage in self.storages]
        groups = range(len(self.layout.windows))
        self._of_positions = [pieces for _ in groups]
        """Per group, memory [pieces, blocks, kv_heads, block_size, width] and the stride of its blocks."""
        if not self.layout.even:
            own = pieces[len(self.model_storages) :]
            self._of_positions = [
                [*((part[None], stride) for part, stride in self.of_group(group)), *own] for group in groups
            ]
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

    def of_group(self, group: int) -> list[tuple[Tensor, int]]:
        """Keys, and values, of each layer of a cache group, each tensor once, and the stride of its blocks."""
        found: dict[Tensor, int] = {}
        for pair, view in zip(self._pairs, self.layout.view_of, strict=True):
            if self.layout.views[view].group == group:
                found |= dict.fromkeys(pair, self.layout.views[view].stride)
        return list(found.items())

    def move(self, group: int, sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> None:
        """Copy single positions of blocks of a cache group, (block, place) each, in all its layers; all are read before
        any is written."""
        device = self.storage.device
        (blocks, places), (new_blocks, new_places) = (
            torch.tensor(pairs, device=device).T for pairs in (sources, targets)
        )
        for every, stride in self._of_positions[group]:
            memory = as_bytes(every)
            memory[:, new_blocks * stride, :, new_places] = memory[:, blocks * stride, :, places]


def _reserve(
    config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    found = []
    for store in cache_layout(config).stores:
        width = row_width(store.head_dim, dtype)
        shape = (store.num_slots, parts_of(config), num_blocks, store.num_kv_heads, block_size, width)
        storage = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            prefer_huge_pages(storage.data_ptr(), storage.nbytes, written=False)
        found.append(storage)
    return tuple(found)


def _pairs(storages: tuple[Tensor, ...], config: DecoderConfig) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer in the form in which it sees them; layers that share them have the same tensors."""
    layout, found = cache_layout(config), {}
    forms = [
        (place, layout.views[view].heads.num_kv_heads, layout.views[view].heads.head_dim)
        for place, view in zip(layout.place_of, layout.view_of, strict=True)
    ]
    for form in dict.fromkeys(forms):
        place, kv_heads, head_dim = form
        memory = storages[place.store][place.slot]
        keys, values = (_seen(memory[side], kv_heads, head_dim, place.part) for side in (0, -1))
        found[form] = keys, values
    return [found[form] for form in forms]


def _seen(slot: Tensor, kv_heads: int, head_dim: int, part: int) -> Tensor:
    """Blocks of a layer's own size, from its `part`-th in the slot [blocks, kv_heads, block_size, width] on."""
    block_size, width = slot.shape[2], row_width(head_dim, slot.dtype)
    if slot.shape[1:] == (kv_heads, block_size, width):
        return slot
    size = kv_heads * block_size * width
    return as_bytes(slot).view(-1, size)[part:].view(-1, kv_heads, block_size, width).view(slot.dtype)


def parts_of(config: DecoderConfig) -> int:
    """Tensors per layer: keys and values, or one of latent vectors."""
    return 2 if config.mla is None else 1
