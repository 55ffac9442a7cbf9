"""The state that a layer has of a sequence beside keys and values."""

from typing import NamedTuple

import torch

from troupellm.models.config.decoder_config import DecoderConfig


class StatePart(NamedTuple):
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None is the model's own."""


def state_parts(config: DecoderConfig, layer: int) -> tuple[StatePart, ...]:
    """The tensors of a layer's state, one or two; none where it has keys and values."""
    if config.layers[layer].mixer == "short_conv":
        assert config.short_conv is not None
        return (StatePart((config.short_conv.taps - 1, config.hidden_size)),)
    return ()


def has_states(config: DecoderConfig) -> bool:
    """True if some layer remembers more than keys and values."""
    return any(shape.mixer != "attention" for shape in config.layers)


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state, of all layers; 0 where there is none."""
    parts = [part for layer in range(config.num_layers) for part in state_parts(config, layer)]
    return sum(torch.Size(part.shape).numel() * (part.dtype or dtype).itemsize for part in parts)
