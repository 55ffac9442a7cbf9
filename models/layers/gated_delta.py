"""Gated delta nets in place of attention: the linear layers of Qwen3-Next and Qwen3.5."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.gated_delta import gated_delta
from troupellm.kernels.linear import PackedLinear, linear, pack
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.short_conv import short_conv
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, GatedDeltaConfig
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.projections import merged_linear, rows_of

LENGTH_EPS = 1e-6
"""Added to the squared length by which queries and keys are divided."""


class GatedDelta:
    """Queries, keys and values behind a short convolution, the gated delta rule, and a gated norm.

    The numbers that decide how fast the state forgets stay float32 and are never quantized.
    """

    def __init__(self, config: DecoderConfig, delta: GatedDeltaConfig, prefix: str, source: WeightSource) -> None:
        hidden, heads = config.hidden_size, delta.value_heads
        self.delta, self.eps = delta, config.rms_norm_eps
        self.channels, self.values = delta.channels, heads * delta.value_size
        self.inputs, gates = _inputs(config, delta, prefix, source)
        """To queries, keys, values and the norm's gates, in this order."""
        self.gates = pack(gates.float())
        """To the logits of beta, and to the steps of forgetting."""
        taps = source.take(f"{prefix}.conv1d.weight", (self.channels, 1, delta.taps))
        self.weight = taps[:, 0].T.contiguous()
        """[taps, channels]."""
        self.rate = -source.take(f"{prefix}.A_log", (heads,)).float().exp()
        self.step_bias = source.take(f"{prefix}.dt_bias", (heads,)).float()
        self.norm = source.take(f"{prefix}.norm.weight", (delta.value_size,)).float()
        self.out = merged_linear(source, (f"{prefix}.out_proj",), (hidden,), self.values, bias=False)

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`."""
        return linear_kernel.best_rows(self.inputs, tokens)

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, angles: Angles | None, cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """As `SelfAttention`. cache: the last inputs of the convolution [slots, taps - 1, channels], and the matrices,
        float32 [slots, value_heads, key_size, value_size]."""
        assert batch.states is not None, "a batch without states for a model that has some"
        delta, tokens, rows = self.delta, batch.token_ids.shape[0], hidden.shape[0]
        projected = linear(hidden, self.inputs)[:tokens]
        mixed = functional.silu(short_conv(projected[:, : self.channels], self.weight, None, cache[0], batch.states))
        keys = delta.key_heads * delta.key_size
        query, key, value = mixed.float().split_with_sizes((keys, keys, self.values), dim=-1)
        query, key = (part.reshape(tokens, delta.key_heads, delta.key_size) for part in (query, key))
        value = value.reshape(tokens, delta.value_heads, delta.value_size)
        chosen, steps = linear(hidden[:tokens].float(), self.gates).chunk(2, dim=-1)
        told = gated_delta(
            _unit(query) * delta.key_size**-0.5,
            _unit(key),
            value,
            self.rate * functional.softplus(steps + self.step_bias),
            chosen.sigmoid(),
            cache[1],
            batch.states,
        )
        normed = rms_norm(told.flatten(0, 1), self.norm, self.eps).view(tokens, -1)
        normed = normed.mul_(functional.silu(projected[:, self.channels :].float())).to(hidden.dtype)
        if keep is not None:
            normed = normed[keep]
        elif rows > tokens:
            normed = functional.pad(normed, (0, 0, 0, rows - tokens))
        return linear(normed, self.out)


def _inputs(
    config: DecoderConfig, delta: GatedDeltaConfig, prefix: str, source: WeightSource
) -> tuple[PackedLinear, Tensor]:
    """The projections of the layer's input: that of the convolution and the norm's gates, and that of both gates."""
    hidden, heads = config.hidden_size, delta.value_heads
    values = heads * delta.value_size
    if not delta.grouped:
        names = (f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z")
        inputs = merged_linear(source, names, (delta.channels, values), hidden, bias=False)
        gates = [source.take(f"{prefix}.in_proj_{name}.weight", (heads, hidden)) for name in ("b", "a")]
        return inputs, torch.cat(gates)
    shared = heads // delta.key_heads
    sizes = (delta.key_size, delta.key_size, shared * delta.value_size, shared * delta.value_size)
    weight = source.linear(f"{prefix}.in_proj_qkvz", (delta.channels + values, hidden))
    both = source.take(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden))
    return (
        pack(rows_of(weight, _ungrouped(delta.key_heads, sizes)), None),
        both[_ungrouped(delta.key_heads, (shared, shared))],
    )


def _ungrouped(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """The rows of each part, int64, one part after the other, in a tensor that has all parts of a group together."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split_with_sizes(sizes, dim=1)])


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, nearly."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
