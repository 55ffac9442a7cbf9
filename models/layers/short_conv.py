"""A gated convolution over the last positions, in place of attention: the operator of LFM2's layers."""

from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.linear import linear
from troupellm.kernels.short_conv import short_conv
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, ShortConvConfig
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.projections import merged_linear


class ShortConv:
    """out_proj(c * conv(b * x)), where b, c and x are thirds of one projection."""

    def __init__(self, config: DecoderConfig, conv: ShortConvConfig, prefix: str, source: WeightSource) -> None:
        hidden = config.hidden_size
        self.inputs = merged_linear(source, (f"{prefix}.in_proj",), (3 * hidden,), hidden, bias=conv.bias)
        self.out = merged_linear(source, (f"{prefix}.out_proj",), (hidden,), hidden, bias=conv.bias)
        self.weight = source.take(f"{prefix}.conv.weight", (hidden, 1, conv.taps))[:, 0].T.contiguous()
        """[taps, hidden]."""
        self.bias = source.take(f"{prefix}.conv.bias", (hidden,)) if conv.bias else None

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`."""
        return linear_kernel.best_rows(self.inputs, tokens)

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, angles: Angles | None, cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """As `SelfAttention`. cache: the last inputs of the convolution, twice the same [slots, taps - 1, hidden]."""
        assert batch.states is not None, "a batch without states for a model that has some"
        tokens, rows = batch.token_ids.shape[0], hidden.shape[0]
        before, behind, x = linear(hidden, self.inputs)[:tokens].chunk(3, dim=-1)
        mixed = short_conv(before * x, self.weight, self.bias, cache[0], batch.states).mul_(behind)
        if keep is not None:
            mixed = mixed[keep]
        elif rows > tokens:
            mixed = functional.pad(mixed, (0, 0, 0, rows - tokens))
        return linear(mixed, self.out)
