"""A decoder's layer with norms that take off the mean, whose parts may lie side by side and have no gate.

LayerNorm: Ba, Kiros and Hinton, 2016. Attention and feed-forward side by side: GPT-J (Wang and Komatsuzaki, 2021).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.fused_decoder.layers import FusedLayerWeights
from troupellm.kernels.linear import linear
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.feed_forward import AddAdapters, FeedForward
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.mixers import make_mixer
from troupellm.models.layers.projections import merged_linear


def _relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": _relu_squared,
}


class LayerNorm:
    """Subtracts the mean of a row, divides it by its standard deviation, and weighs it."""

    def __init__(self, config: DecoderConfig, block: LayerNormBlock, source: WeightSource, name: str) -> None:
        self._size, self._eps = (config.hidden_size,), config.rms_norm_eps
        self.weight = source.take(f"{name}.weight", self._size).float() + config.norm_offset
        self._bias = source.take(f"{name}.bias", self._size).float() if block.norm_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] in the type of `x`; computed in float32."""
        return functional.layer_norm(x.float(), self._size, self.weight, self._bias, self._eps).to(x.dtype)


class UngatedFeedForward:
    """Up, activation, down."""

    def __init__(self, config: DecoderConfig, activation: str, prefix: str, source: WeightSource, size: int) -> None:
        hidden = config.hidden_size
        self._activation = ACTIVATIONS[activation]
        self.up = merged_linear(source, (f"{prefix}.up_proj",), (size,), hidden, bias=config.mlp_bias)
        self.down = merged_linear(source, (f"{prefix}.down_proj",), (hidden,), size, bias=config.mlp_bias)

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`."""
        return linear_kernel.best_rows(self.up, tokens)

    def __call__(self, hidden: Tensor, tokens: int) -> Tensor:
        """As `FeedForwardPart`."""
        return linear(self._activated(linear(hidden, self.up)), self.down)

    def adapted(self, hidden: Tensor, add_adapters: AddAdapters) -> Tensor:
        """As `FeedForward.adapted`."""
        wide = linear(hidden, self.up)
        add_adapters("gate_up", hidden, wide)
        between = self._activated(wide)
        down = linear(between, self.down)
        add_adapters("down", between, down)
        return down

    def _activated(self, wide: Tensor) -> Tensor:
        if not self.up.invariant or wide.device.type != "cpu":
            return self._activation(wide)
        for row in wide:  # each as if it were alone: torch's last bits depend on a number's place in a tensor
            row.copy_(self._activation(row))
        return wide


class LayerNormLayer:
    """As `DecoderLayer`, of a model with a `LayerNormBlock`. Adds its parts to the residual and leaves no update."""

    def __init__(self, config: DecoderConfig, block: LayerNormBlock, layer: int, source: WeightSource) -> None:
        self.number, prefix, norms = layer, f"model.layers.{layer}", config.norms
        self.before_attention = LayerNorm(config, block, source, f"{prefix}.{norms.before_attention}")
        self.attention = make_mixer(config, layer, source)
        self.before_feed_forward: LayerNorm | None = None
        """None where both parts read the same norm."""
        if norms.before_feed_forward is not None:
            self.before_feed_forward = LayerNorm(config, block, source, f"{prefix}.{norms.before_feed_forward}")
        self.feed_forward: FeedForward | UngatedFeedForward
        size = config.layers[layer].intermediate_size
        if block.ungated is None:
            self.feed_forward = FeedForward(config, f"{prefix}.mlp", source, size)
        else:
            self.feed_forward = UngatedFeedForward(config, block.ungated, f"{prefix}.mlp", source, size)
        self._parallel = block.parallel

    def __call__(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `DecoderLayer`; it leaves no update."""
        residual = residual if update is None else residual.add_(update)
        tokens = batch.token_ids.shape[0] if keep is None else keep.shape[0]
        normed = self.before_attention(residual)
        attended = self.attention(normed, batch, angles, cache, keep)
        if keep is not None:
            residual, normed = residual[keep], normed[keep]
        if not self._parallel:
            residual.add_(attended)
        if self.before_feed_forward is not None:
            normed = self.before_feed_forward(residual)
        if batch.adapters is None:
            fed = self.feed_forward(normed, tokens)
        else:
            fed = self.feed_forward.adapted(normed, partial(batch.adapters.add, self.number, kept=keep is not None))
        return None, residual.add_(fed + attended if self._parallel else fed)

    def parts(self, rotation: int | None) -> FusedLayerWeights | None:
        """None: compiled code has no layer of this form."""
        return None
