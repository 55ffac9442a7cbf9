"""Multi-head latent attention (DeepSeek-V2 and V3): one small vector per token is cached instead of keys and values."""

from torch import Tensor

from troupellm.kernels.linear import PackedLinear, linear
from troupellm.kernels.mla_attention import mla_attention
from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.rope_kv_write.kv_write import kv_write
from troupellm.kernels.rope_kv_write.rope import rope
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, MlaConfig
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.projections import merged_linear

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors; it does not depend on the layers' epsilon."""


class LatentAttention:
    """Queries, through a latent vector of their own where the model has one, against cached latent vectors."""

    def __init__(self, config: DecoderConfig, mla: MlaConfig, layer: int, prefix: str, source: WeightSource) -> None:
        self.num_heads, self.mla = config.layers[layer].num_heads, mla
        self.view = cache_layout(config).view_of[layer]
        size = mla.plain + mla.rotated
        self.scale = size**-0.5 if config.attention_scale is None else config.attention_scale
        self.rope_interleaved = config.rope_interleaved
        query = self.num_heads * size
        self.query_width = query if mla.query_latent is None else mla.query_latent
        first = f"{prefix}.q_proj" if mla.query_latent is None else f"{prefix}.q_a_proj"
        self.down = merged_linear(
            source,
            (first, f"{prefix}.kv_a_proj_with_mqa"),
            (self.query_width, mla.latent + mla.rotated),
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self.query_norm: Tensor | None = None
        self.query_up: PackedLinear | None = None
        if mla.query_latent is not None:
            self.query_norm = source.take(f"{prefix}.q_a_layernorm.weight", (mla.query_latent,))
            self.query_up = merged_linear(source, (f"{prefix}.q_b_proj",), (query,), mla.query_latent, bias=False)
        self.latent_norm = source.take(f"{prefix}.kv_a_layernorm.weight", (mla.latent,))
        both = source.linear(f"{prefix}.kv_b_proj", (self.num_heads * (mla.plain + mla.value), mla.latent))
        if isinstance(both, QuantizedWeight):
            both = both.dequantize(self.latent_norm.dtype)
        per_head = both.view(self.num_heads, mla.plain + mla.value, mla.latent)
        self.key_weight = per_head[:, : mla.plain].contiguous()
        """[heads, plain, latent]: makes the plain part of each head's key from a latent vector."""
        self.value_weight = per_head[:, mla.plain :].contiguous()
        """[heads, value, latent]."""
        self.out = merged_linear(
            source, (f"{prefix}.o_proj",), (config.hidden_size,), self.num_heads * mla.value, bias=config.out_bias
        )

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`: no more than there are."""
        return tokens

    def __call__(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        angles: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        keep: Tensor | None,
    ) -> Tensor:
        """As `SelfAttention`; both caches are the same one, [blocks, 1, block_size, latent + rotated]."""
        assert angles is not None
        rows, mla, group = hidden.shape[0], self.mla, batch.groups[self.view]
        projected = linear(hidden, self.down)
        query, latent = projected[:, : self.query_width], projected[:, self.query_width :]
        if self.query_norm is not None and self.query_up is not None:
            query = linear(rms_norm(query.contiguous(), self.query_norm, NORM_EPS), self.query_up)
        query = query.reshape(rows, self.num_heads, mla.plain + mla.rotated)
        entry = latent.new_empty(rows, 1, mla.latent + mla.rotated)
        entry[:, 0, : mla.latent] = rms_norm(latent[:, : mla.latent].contiguous(), self.latent_norm, NORM_EPS)
        entry[..., mla.latent :] = rope(latent[:, None, mla.latent :], *angles, interleaved=self.rope_interleaved)
        turned = rope(query[..., mla.plain :], *angles, interleaved=self.rope_interleaved)
        query[..., mla.plain :] = turned
        if batch.query_factors is not None:
            query[: batch.query_factors.shape[0]].mul_(batch.query_factors[:, None])
        kv_write(entry, entry, *cache, group.kv_rows)
        mixed = mla_attention(
            query,
            cache[0],
            group.plan,
            self.key_weight,
            self.value_weight,
            self.scale,
            batch_invariant=self.down.invariant,
        )
        flat = mixed.view(rows, -1)
        return linear(flat if keep is None else flat[keep], self.out)
