"""State-space layers in place of attention: Mamba-2, as in Granite 4."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.gated_delta import gated_delta
from troupellm.kernels.linear import linear
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.short_conv import short_conv
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, SsdConfig
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.projections import merged_linear


class Ssd:
    """A short convolution, a recurrence that forgets by steps, and a gated norm; of Dao and Gu 2024, "Transformers are
    SSMs".

    Inputs times their steps are the values of the gated delta rule without its correction; B are its keys, C its
    queries.
    """

    def __init__(self, config: DecoderConfig, ssd: SsdConfig, prefix: str, source: WeightSource) -> None:
        hidden, heads, width = config.hidden_size, ssd.heads, ssd.width
        self.ssd, self.eps = ssd, config.rms_norm_eps
        outputs = width + ssd.channels + heads
        self.inputs = merged_linear(source, (f"{prefix}.in_proj",), (outputs,), hidden, bias=ssd.bias)
        """To the norm's gates, to what the convolution mixes, and to the steps, in this order."""
        self.weight = source.take(f"{prefix}.conv1d.weight", (ssd.channels, 1, ssd.taps))[:, 0].T.contiguous()
        """[taps, channels]."""
        self.conv_bias = source.take(f"{prefix}.conv1d.bias", (ssd.channels,)) if ssd.conv_bias else None
        self.rate = -source.take(f"{prefix}.A_log", (heads,)).float().exp()
        self.step_bias, self.skip = (source.take(f"{prefix}.{name}", (heads,)).float() for name in ("dt_bias", "D"))
        self.norm = source.take(f"{prefix}.norm.weight", (width,)).float()
        self.unit = torch.ones_like(self.norm[: width // ssd.groups])
        """Of the norms of groups, whose weights differ."""
        self.out = merged_linear(source, (f"{prefix}.out_proj",), (hidden,), width, bias=ssd.bias)

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`."""
        return linear_kernel.best_rows(self.inputs, tokens)

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, angles: Angles | None, cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """As `SelfAttention`. cache: the last inputs of the convolution [slots, taps - 1, channels], and the states,
        float32 [slots, heads, state_size, head_size]."""
        assert batch.states is not None, "a batch without states for a model that has some"
        ssd, tokens, rows = self.ssd, batch.token_ids.shape[0], hidden.shape[0]
        gate, inputs, steps = linear(hidden, self.inputs)[:tokens].split_with_sizes(
            (ssd.width, ssd.channels, ssd.heads), dim=-1
        )
        mixed = functional.silu(short_conv(inputs, self.weight, self.conv_bias, cache[0], batch.states)).float()
        keys = ssd.groups * ssd.state_size
        x, key, query = mixed.split_with_sizes((ssd.width, keys, keys), dim=-1)
        x = x.reshape(tokens, ssd.heads, ssd.head_size)
        key, query = (part.reshape(tokens, ssd.groups, ssd.state_size) for part in (key, query))
        step = functional.softplus(steps.float() + self.step_bias).clamp(ssd.least_step, ssd.most_step)
        told = gated_delta(query, key, x * step[..., None], self.rate * step, None, cache[1], batch.states)
        told = (told + x * self.skip[:, None]).view(tokens, -1) * functional.silu(gate.float())
        normed = rms_norm(told.view(tokens * ssd.groups, -1), self.unit, self.eps).view(tokens, -1)
        normed = normed.mul_(self.norm).to(hidden.dtype)
        if keep is not None:
            normed = normed[keep]
        elif rows > tokens:
            normed = functional.pad(normed, (0, 0, 0, rows - tokens))
        return linear(normed, self.out)
