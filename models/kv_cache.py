"""The KV cache: one pair of tensors per layer, in blocks that rows name by number."""

import torch
from torch import Tensor

from troupellm.kernels.kv_codes import as_bytes, row_width
from troupellm.kernels.linear.huge_pages import prefer_huge_pages
from troupellm.models.cache_layout import cache_layout
from troupellm.models.decoder_config import DecoderConfig

CPU = torch.device("cpu")


class KVCache:
    """Keys and values of all layers.

    Attributes:
        layers: per layer (keys, values), each [blocks, kv_heads, block_size, head_dim], or wider where the type needs
            it (see `kernels.kv_codes`); with latent attention it is twice the same tensor. Layers of different cache
            groups may share the memory, not the blocks.
    """

    def __init__(
        self, config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        """Reserve the memory; the system hands it out as it is written to, and nothing is read before that."""
        self.layout = cache_layout(config)
        width = row_width(config.head_dim, dtype)
        shape = (self.layout.num_slots, parts_of(config), num_blocks, config.num_kv_heads, block_size, width)
        self.num_blocks, self.block_size, self.num_kv_heads = num_blocks, block_size, config.num_kv_heads
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            prefer_huge_pages(self.storage.data_ptr(), self.storage.nbytes, written=False)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self.storage[slot, 0], self.storage[slot, -1]) for slot in self.layout.slot_of
        ]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of any group, (source, target) each; all sources are read before any target is written."""
        blocks = torch.tensor(pairs)
        if self.storage.is_cuda:  # pinned: nobody waits
            blocks = blocks.pin_memory().to(self.storage.device, non_blocking=True)
        sources, targets = blocks.T
        storage = as_bytes(self.storage)
        storage[:, :, targets] = storage[:, :, sources]


def parts_of(config: DecoderConfig) -> int:
    """Tensors per layer: keys and values, or one of latent vectors."""
    return 2 if config.mla is None else 1
