"""A drafter's memory needs, known before any of it is read."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.protocol.config.engine import ModelConfig

BORDER_BYTES = 4
"""Bytes of a number of `KVCache.borders`."""
MARK_NUMBERS = 2
"""The last ones that a block has there, of a drafter with layers of its own: see `marks`."""


class DrafterNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, and layers of the cache."""

    weight_bytes: int = 0
    activation_bytes: int = 0
    layers: DecoderConfig | None = None
    """The drafter, if its keys and values are in the model's blocks; None if it has no cache."""
    width: int = 0
    """Numbers of a hidden state that is kept for every row between two steps."""

    shown: int = 0
    """Numbers of hidden states that it is shown of every token of the model's."""

    border: int = 0
    """Numbers that are kept for every block: a hidden state of its last position if one is wanted, and a mark."""

    def block_bytes(self, layers: int) -> int:
        """A drafter's part of a block.

        Args:
            layers: bytes of its layers' keys and values.
        """
        return layers + BORDER_BYTES * self.border

    def row_bytes(self, itemsize: int) -> int:
        """Bytes kept per row."""
        return self.width * itemsize


NO_DRAFTER = DrafterNeeds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that is drafted for."""

    folder: Path
    model: ModelConfig
    """Settings with which it is read."""
    config: DecoderConfig
    dtype: torch.dtype
    """Type of activations."""
    device: torch.device
    max_model_len: int
