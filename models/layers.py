"""The layers that all families share. Each takes its tensors from a weight source while it is built."""

import torch
from torch import Tensor

from troupellm.kernels.kv_write import kv_write
from troupellm.kernels.linear import PackedLinear, linear, pack
from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.kernels.rope import rope
from troupellm.kernels.silu_mul import silu_mul
from troupellm.models.checkpoint import WeightSource
from troupellm.models.forward_batch import ForwardBatch
from troupellm.models.hf_config import DecoderConfig

KVPair = tuple[Tensor, Tensor]
"""One layer's key and value cache, [blocks, kv_heads, block_size, head_dim]."""


def merged_linear(source: WeightSource, names: tuple[str, ...], sizes: tuple[int, ...], in_features: int,
                  *, bias: bool) -> PackedLinear:  # fmt: skip
    """Projections of the same input as one: outputs of `sizes`, side by side."""
    weights = [source.take(f"{name}.weight", (size, in_features)) for name, size in zip(names, sizes, strict=True)]
    biases = [source.take(f"{name}.bias", (size,)) for name, size in zip(names, sizes, strict=True)] if bias else []
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return pack(weight, torch.cat(biases) if biases else None)


class Attention:
    """Self-attention with grouped heads, rotary positions and a paged cache."""

    def __init__(self, config: DecoderConfig, layer: int, prefix: str, source: WeightSource) -> None:
        size = config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, size
        self.window = config.windows[layer]
        self.scale = size**-0.5
        self.eps = config.rms_norm_eps
        self.qkv = merged_linear(
            source,
            (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            (config.num_heads * size, config.num_kv_heads * size, config.num_kv_heads * size),
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self.out = merged_linear(
            source, (f"{prefix}.o_proj",), (config.hidden_size,), config.num_heads * size, bias=config.out_bias
        )
        self.norms = (
            (source.take(f"{prefix}.q_norm.weight", (size,)), source.take(f"{prefix}.k_norm.weight", (size,)))
            if config.qk_norm
            else None
        )

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, angles: tuple[Tensor, Tensor], cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """[rows, hidden] to [rows, hidden], or to [kept, hidden]; all tokens' keys and values are written to the cache.

        There may be more rows than tokens; what the rows behind the tokens hold does not matter.
        """
        rows, tokens = hidden.shape[0], batch.token_ids.shape[0]
        heads, turned = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = linear(hidden, self.qkv).view(rows, -1, self.head_dim)
        qk = qkv[:, :turned]
        if self.norms is not None:
            query, key = (
                rms_norm(part, weight, self.eps)
                for part, weight in zip((qk[:, :heads], qk[:, heads:]), self.norms, strict=True)
            )
            qk = torch.cat((query, key), dim=1)
        qk = rope(qk, *angles)
        kv_write(qk[:tokens, heads:], qkv[:tokens, turned:], *cache, batch.kv_rows)
        attended = paged_attention(qk[:, :heads], *cache, batch.plans[self.window], self.scale)
        flat = attended.view(rows, -1)
        return linear(flat if keep is None else flat[keep], self.out)


class FeedForward:
    """silu(gate) * up, then down."""

    def __init__(self, config: DecoderConfig, prefix: str, source: WeightSource) -> None:
        size = config.intermediate_size
        self.gate_up = merged_linear(
            source, (f"{prefix}.gate_proj", f"{prefix}.up_proj"), (size, size), config.hidden_size,
            bias=config.mlp_bias,
        )  # fmt: skip
        self.down = merged_linear(source, (f"{prefix}.down_proj",), (config.hidden_size,), size, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        return linear(silu_mul(linear(hidden, self.gate_up)), self.down)


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource) -> None:
        prefix = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = source.take(f"{prefix}.input_layernorm.weight", (config.hidden_size,))
        self.attention = Attention(config, layer, f"{prefix}.self_attn", source)
        self.post_norm = source.take(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,))
        self.feed_forward = FeedForward(config, f"{prefix}.mlp", source)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        angles: tuple[Tensor, Tensor],
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            update: [rows, hidden], what the layer before adds to the residual.
            residual: [rows, hidden]; changed in place.
            keep: int64 [kept], the rows to go on with after the attention; None is all.

        Returns:
            this layer's update and the residual, [rows, hidden] or [kept, hidden].
        """
        hidden = add_rms_norm(update, residual, self.input_norm, self.eps)
        attended = self.attention(hidden, batch, angles, cache, keep)
        if keep is not None:
            residual = residual[keep]
        hidden = add_rms_norm(attended, residual, self.post_norm, self.eps)
        return self.feed_forward(hidden), residual
