"""The memory of states beside the KV cache: of running sequences, and of prefixes."""

from typing import NamedTuple

import torch

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.states import state_bytes
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError

CACHE_SHARE = 10
"""Snapshots take a tenth of the memory of keys and values, unless a setting says how much."""


class StateRoom(NamedTuple):
    """Sizes in bytes."""

    size: int
    """Of one state; 0: the model has none."""
    rows: int
    """States of running sequences."""
    asked: int | None
    """For snapshots; None is a share of the cache."""

    @property
    def reserved(self) -> int:
        """Taken before the KV cache is divided into blocks."""
        return self.rows * self.size + (self.asked or 0)

    def left_for_blocks(self, room: int) -> int:
        """The part of what is left that the KV cache may take."""
        return room if self.asked is not None else room * CACHE_SHARE // (CACHE_SHARE + 1)

    def snapshots(self, num_blocks: int, kv_cache_bytes: int) -> int:
        """The number of snapshots: never more than blocks, since each is of a prefix of its own."""
        if not self.size:
            return 0
        return min(num_blocks, (kv_cache_bytes // CACHE_SHARE if self.asked is None else self.asked) // self.size)


def state_room(model: DecoderConfig, config: EngineConfig, dtype: torch.dtype, available: int) -> StateRoom:
    """
    Args:
        dtype: of the model.
        available: bytes beside the weights.

    Raises:
        ConfigError: running sequences need more.
    """
    size, rows = state_bytes(model, dtype), config.scheduler.max_num_seqs
    if not size:
        return StateRoom(0, 0, 0)
    if rows * size > available:
        raise ConfigError(
            f"max_num_seqs {rows} needs {rows * size} bytes of states, {size} for each sequence; "
            f"{max(available, 0)} bytes are free beside the weights",
            param="max_num_seqs",
        )
    return StateRoom(size, rows, config.cache.max_state_snapshots_bytes if config.cache.enable_prefix_caching else 0)
