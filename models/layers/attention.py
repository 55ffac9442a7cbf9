"""Self-attention over the paged cache."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.linear import QuantizedRows, activation_dtype, linear, linear_add, norm_linear
from troupellm.kernels.paged_attention import Plan, paged_attention
from troupellm.kernels.paged_attention.cpu import CELLS, CppAttention, Rotation, cpp_attention, takes_compiled
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.rope_kv_write import HeadNorms, head_norm, rope_kv_write
from troupellm.kernels.rope_kv_write.rope import rope
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.norm import take_norm
from troupellm.models.layers.projections import grouped_rows, merged_linear

KVPair = tuple[Tensor, Tensor]
"""One layer's key and value cache, [blocks, kv_heads, block_size, head_dim]."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the batch's positions, [rows, 1, rotary_dim / 2]."""


SINKS = ("sinks", "attention_sink_bias")
"""Names of a layer's sinks; the first one that the checkpoint has is read."""


class SelfAttention(Protocol):
    """The interface of a layer's attention."""

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, angles: Angles | None, cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """[rows, hidden] to [rows, hidden], or to [kept, hidden]; all tokens' keys and values are written to the cache.

        There may be more rows than tokens; rows beyond the tokens may hold anything.

        Args:
            angles: of the layer's rotation; None is none.
            keep: int64 [kept], the rows to go on with; None is all.
        """

    def best_rows(self, tokens: int) -> int:
        """The number of rows, at least `tokens`, that the layer's products run best with."""


class Attention:
    """Self-attention with grouped heads and rotary positions."""

    def __init__(
        self, config: DecoderConfig, layer: int, prefix: str, source: WeightSource, *, input_size: int | None = None
    ) -> None:
        """input_size: width of the input of queries, keys and values, if it is not the hidden size."""
        shape, self.layer = config.layers[layer], layer
        size = shape.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, size
        self.view = cache_layout(config).view_of[layer]
        self.scale = size**-0.5 if config.attention_scale is None else config.attention_scale
        self.eps = config.rms_norm_eps
        self.softcap, self.rope_interleaved = config.attention_softcap, config.rope_interleaved
        query, key = shape.query_width, shape.key_width
        sizes = config.query_key_value(shape)
        names = tuple(f"{prefix}.{name}" for name in sizes)
        inputs = input_size or config.hidden_size
        order = grouped_rows(shape.num_heads, shape.num_kv_heads, size) if config.qkv_by_group else None
        self.qkv = merged_linear(source, names, tuple(sizes.values()), inputs, bias=config.qkv_bias, order=order)
        self.out = merged_linear(
            source, (f"{prefix}.o_proj",), (config.hidden_size,), shape.mixed_width, bias=config.out_bias
        )
        self.sinks: Tensor | None = None
        if shape.sinks:
            name = next((name for name in SINKS if source.has(f"{prefix}.{name}")), SINKS[0])
            self.sinks = source.take(f"{prefix}.{name}", (shape.num_heads,)).float()
        self.norms: tuple[Tensor, Tensor] | None = None
        """Norms of queries and keys, [head_dim] or [all heads * head_dim]; without own keys that of queries twice."""
        if config.qk_norm == "bare" and shape.rope is not None:  # a rotation keeps the length that it divides by
            ones = torch.ones(size, dtype=torch.float32, device=self.qkv.weight.device)
            self.norms = (ones, ones)
        elif config.qk_norm in ("head", "full"):
            widths = (size, size) if config.qk_norm == "head" else (query, key)
            query_norm = take_norm(config, source, f"{prefix}.q_norm", widths[0])
            shared = shape.kv_from is not None
            self.norms = (
                query_norm,
                query_norm if shared else take_norm(config, source, f"{prefix}.k_norm", widths[1]),
            )
        self.reads_others, self.keys_as_values = shape.kv_from is not None, shape.keys_as_values
        self.value_dim, self.value_width, self.value_scale = shape.value_dim, shape.value_width, config.value_scale
        self.value_norm: Tensor | None = None
        """Ones [head_dim]."""
        if config.value_norm and not self.reads_others:
            self.value_norm = torch.ones(size, dtype=torch.float32, device=self.qkv.weight.device)
        growth = config.query_growth
        self.grows = growth is not None and not (growth.unrotated and shape.rope is not None)
        special = self.reads_others, self.keys_as_values, self.value_dim is not None, self.value_norm is not None
        self.plain = self.value_scale == 1.0 and not any(special)
        """True if queries, keys and values lie beside each other as the products give them."""
        self.native = None if self.reads_others else self._native(shape)
        """The compiled path between the two products."""
        self.codes = activation_dtype(self.qkv)
        self.adds = self.qkv.fuses and self.out.fuses
        """True if `attended` and `add` are faster than the separate operations."""

    def best_rows(self, tokens: int) -> int:
        """As `SelfAttention.best_rows`."""
        return linear_kernel.best_rows(self.qkv, tokens)

    def __call__(
        self,
        hidden: Tensor | QuantizedRows,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None,
    ) -> Tensor:
        """As `SelfAttention`; `hidden` may be of the type `codes`, but not where the batch has adapters."""
        qkv, adapters = linear(hidden, self.qkv), batch.adapters
        if adapters is not None:
            assert isinstance(hidden, Tensor)
            adapters.add(self.layer, "qkv", hidden, qkv)
        mixed = self._mixed(qkv, batch, angles, cache, keep)
        projected = linear(mixed, self.out)
        if adapters is not None:
            adapters.add(self.layer, "out", mixed, projected, kept=keep is not None)
        return projected

    def attended(
        self,
        residual: Tensor,
        norm: Tensor | None,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None,
    ) -> Tensor:
        """The attention of the normed residual [rows, hidden], as input of `add`: [rows or kept, heads * head_dim]."""
        qkv = linear(residual, self.qkv) if norm is None else norm_linear(residual, norm, self.eps, self.qkv)
        return self._mixed(qkv, batch, angles, cache, keep)

    def add(self, attended: Tensor, residual: Tensor, factor: float) -> None:
        """Project the attention's result, and add `factor` times that to the residual of the same rows, in place."""
        linear_add(attended, self.out, residual, factor)

    def _mixed(
        self, qkv: Tensor, batch: ForwardBatch, angles: Angles | None, cache: KVPair, keep: Tensor | None
    ) -> Tensor:
        """The attention's result for queries, keys and values [rows, ...]; keys and values are cached first."""
        rows = qkv.shape[0]
        group = batch.groups[self.view]
        plan = group.plan
        if batch.query_factors is not None and self.grows:  # the rotation keeps the factor
            qkv[: batch.query_factors.shape[0], : self.num_heads * self.head_dim].mul_(batch.query_factors)
        if not self.plain:
            if self.reads_others:
                return self._read(qkv, plan, angles, cache, keep)
            qkv = self._with_values(qkv)
        if self.native is not None and qkv.dtype == torch.float32 and cache[0].dtype in CELLS and takes_compiled(plan):
            return self._kept(self.native.write_and_attend(qkv, cache, plan, group.kv_rows, angles), keep)
        norms = None if self.norms is None else HeadNorms(*self.norms, self.eps)
        query = rope_kv_write(
            qkv.view(rows, -1, self.head_dim),
            self.num_heads,
            cache,
            group.kv_rows,
            norms=norms,
            angles=angles,
            interleaved=self.rope_interleaved,
        )
        attended = paged_attention(query, *cache, plan, self.scale, softcap=self.softcap, sinks=self.sinks)
        return self._kept(attended.view(rows, -1), keep)

    def _with_values(self, qkv: Tensor) -> Tensor:
        """Queries, keys, and values as the cache has them, [rows, (heads + 2 * kv_heads) * head_dim]."""
        heads, width = self.num_kv_heads, self.value_width
        if self.keys_as_values:
            qkv = torch.cat((qkv, qkv[:, -width:]), dim=1)
        values = qkv[:, -width:]
        if self.value_scale != 1.0:
            values.mul_(self.value_scale)
        if self.value_norm is not None:
            parted = values.view(values.shape[0], heads, -1)
            parted.copy_(rms_norm(parted, self.value_norm, self.eps))
        if self.value_dim is None:
            return qkv
        padded = functional.pad(values.view(values.shape[0], heads, -1), (0, self.head_dim - self.value_dim))
        return torch.cat((qkv[:, :-width], padded.flatten(1)), dim=1)

    def _kept(self, attended: Tensor, keep: Tensor | None) -> Tensor:
        """The rows to go on with, and of every head's result what its values have."""
        kept = attended if keep is None else attended[keep]
        if self.value_dim is None:
            return kept
        return kept.view(kept.shape[0], self.num_heads, self.head_dim)[..., : self.value_dim].flatten(1)

    def _read(self, projected: Tensor, plan: Plan, angles: Angles | None, cache: KVPair, keep: Tensor | None) -> Tensor:
        """The result of queries [rows, heads * head_dim] for keys and values of another layer, which it has written."""
        rows = projected.shape[0]
        query = projected.view(rows, self.num_heads, self.head_dim)
        if self.norms is not None:
            query = head_norm(query, self.norms[0], self.eps)
        if angles is not None:
            query = rope(query, *angles, interleaved=self.rope_interleaved)
        attended = paged_attention(query, *cache, plan, self.scale, softcap=self.softcap, sinks=self.sinks)
        return self._kept(attended.view(rows, -1), keep)

    def _native(self, shape: LayerShape) -> CppAttention | None:
        if self.qkv.weight.device.type != "cpu":  # other devices have no compiled code
            return None
        if self.rope_interleaved or (
            self.norms is not None and any(norm.shape[0] != self.head_dim for norm in self.norms)
        ):
            return None
        turned = 0 if shape.rope is None else shape.rotary_dim or self.head_dim
        return cpp_attention(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            rotation=Rotation(self.norms, self.eps, turned),
        )
