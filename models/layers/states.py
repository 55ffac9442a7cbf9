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
    mixer = config.layers[layer].mixer
    if mixer == "short_conv" and config.short_conv is not None:
        return (StatePart((config.short_conv.taps - 1, config.hidden_size)),)
    if mixer == "gated_delta" and (delta := config.gated_delta) is not None:
        matrices = (delta.value_heads, delta.key_size, delta.value_size)
        return StatePart((delta.taps - 1, delta.channels)), StatePart(matrices, torch.float32)
    if mixer == "ssd" and (ssd := config.ssd) is not None:
        matrices = (ssd.heads, ssd.state_size, ssd.head_size)
        return StatePart((ssd.taps - 1, ssd.channels)), StatePart(matrices, torch.float32)
    return ()


def conv_taps(config: DecoderConfig) -> int:
    """Of the convolutions of all layers that have one; 0 where there is none."""
    return next((part.taps for part in (config.short_conv, config.gated_delta, config.ssd) if part is not None), 0)


def has_states(config: DecoderConfig) -> bool:
    """True if some layer remembers more than keys and values."""
    return any(shape.mixer not in ("attention", "none") for shape in config.layers)


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state, of all layers; 0 where there is none."""
    parts = [part for layer in range(config.num_layers) for part in state_parts(config, layer)]
    return sum(torch.Size(part.shape).numel() * (part.dtype or dtype).itemsize for part in parts)
