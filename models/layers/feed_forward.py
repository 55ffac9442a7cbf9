"""The feed-forward part of a layer."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from troupellm.kernels.linear import (
    GATES,
    QuantizedRows,
    activation_dtype,
    gated_linear,
    gated_quantized,
    linear,
    linear_add,
)
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.experts import Experts, block_prefix
from troupellm.models.layers.projections import merged_linear

AddAdapters = Callable[[str, Tensor, Tensor], None]
"""Adds the adapters' part of a product to its result, by the product's name: input, result."""


class FeedForwardPart(Protocol):
    """The interface of a layer's feed-forward part."""

    def __call__(self, hidden: Tensor, tokens: int) -> Tensor:
        """[rows, hidden] to [rows, hidden]; rows beyond the first `tokens` may hold anything."""


def make_feed_forward(config: DecoderConfig, layer: int, source: WeightSource) -> FeedForwardPart:
    """The feed-forward part of one layer, with its weights taken from `source`."""
    prefix, moe = f"model.layers.{layer}", config.layers[layer].experts
    if moe is None:
        return FeedForward(config, f"{prefix}.mlp", source, config.layers[layer].intermediate_size)
    prefix = block_prefix(moe, prefix, source)
    shared = FeedForward(config, f"{prefix}.{moe.names.shared}", source, moe.shared_size) if moe.shared_size else None
    return Experts(config, moe, prefix, source, shared)


class FeedForward:
    """activation(gate) * up, then down."""

    def __init__(self, config: DecoderConfig, prefix: str, source: WeightSource, size: int) -> None:
        self.activation = config.activation
        sizes = config.gate_up(size)
        names = tuple(f"{prefix}.{name}" for name in sizes)
        self.gate_up = merged_linear(source, names, tuple(sizes.values()), config.hidden_size, bias=config.mlp_bias)
        self.down = merged_linear(source, (f"{prefix}.down_proj",), (config.hidden_size,), size, bias=config.mlp_bias)

        self.adds = self.gate_up.fuses and self.down.fuses
        """True if `add` is faster than the separate operations."""
        self.codes, self._between = activation_dtype(self.gate_up), activation_dtype(self.down)

    def __call__(self, hidden: Tensor | QuantizedRows, tokens: int) -> Tensor:
        """As `FeedForwardPart`; `hidden` may be of the type `codes`."""
        if self._between is not None:
            return linear(gated_quantized(hidden, self.gate_up, self.activation, self._between), self.down)
        return linear(gated_linear(hidden, self.gate_up, self.activation), self.down)

    def adapted(self, hidden: Tensor, add_adapters: AddAdapters) -> Tensor:
        """As `__call__`, with adapters on both products."""
        gate_up = linear(hidden, self.gate_up)
        add_adapters("gate_up", hidden, gate_up)
        between = GATES[self.activation](gate_up)
        down = linear(between, self.down)
        add_adapters("down", between, down)
        return down

    def add(self, residual: Tensor, norm: Tensor | None, eps: float, factor: float) -> None:
        """Add `factor` times this part of the normed residual to the residual [rows, hidden], in place."""
        linear_add(gated_linear(residual, self.gate_up, self.activation, norm, eps), self.down, residual, factor)
