"""The feed-forward part of a layer."""

from typing import Protocol

from torch import Tensor

from troupellm.kernels.linear import linear
from troupellm.kernels.silu_mul import silu_mul
from troupellm.models.checkpoint import WeightSource
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.layers.projection import merged_linear
from troupellm.protocol.errors import ModelLoadError


class FeedForwardPart(Protocol):
    """What a layer needs of its feed-forward part."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, hidden]."""


def make_feed_forward(config: DecoderConfig, layer: int, source: WeightSource) -> FeedForwardPart:
    """The feed-forward part of one layer, with its weights taken from `source`."""
    if config.moe is not None and config.moe.layers[layer]:
        raise ModelLoadError(f"{config.architecture}: experts are not supported")
    return FeedForward(config, f"model.layers.{layer}.mlp", source)


class FeedForward:
    """activation(gate) * up, then down."""

    def __init__(self, config: DecoderConfig, prefix: str, source: WeightSource) -> None:
        size = config.intermediate_size
        sizes = {"gate_proj": size, "up_proj": size} if config.gate_up_name is None else {config.gate_up_name: 2 * size}
        names = tuple(f"{prefix}.{name}" for name in sizes)
        self.gate_up = merged_linear(source, names, tuple(sizes.values()), config.hidden_size, bias=config.mlp_bias)
        self.down = merged_linear(source, (f"{prefix}.down_proj",), (config.hidden_size,), size, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, hidden]."""
        return linear(silu_mul(linear(hidden, self.gate_up)), self.down)
