"""Counts a model's parameters, and its matrix products, from its configuration."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, MlaConfig, MoeConfig


class Product(NamedTuple):
    """Weights of one shape that can be quantized on load."""

    number: int
    rows: int
    columns: int
    experts: bool = False
    head: bool = False
    """The vocabulary's, which may be the embedding once more."""
    gate_up: bool = False
    """The first one of a gated part."""


def products(model: DecoderConfig) -> Iterator[Product]:
    """All matrix products, except routers, classifiers and the expanded matrices of latent attention."""
    hidden, moe = model.hidden_size, model.moe
    for rows, columns in _attention_shapes(model) if model.mla is None else _latent_shapes(model, model.mla):
        yield Product(model.num_layers, rows, columns)
    sparse = 0 if moe is None else sum(moe.layers)
    gated = [(model.num_layers - sparse, model.intermediate_size, False)]
    if moe is not None:
        gated += [(sparse * moe.num_experts, moe.intermediate_size, True), (sparse, moe.shared_size, False)]
    halves = 1 if _ungated(model) else 2
    for count, size, experts in gated:
        yield Product(count, halves * size, hidden, experts, gate_up=halves == 2)
        yield Product(count, hidden, size, experts)
    if model.head == "lm":
        yield Product(1, model.vocab_size, hidden, head=True)


def _attention_shapes(model: DecoderConfig) -> list[tuple[int, int]]:
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return [(heads + 2 * kv_heads, model.hidden_size), (model.hidden_size, heads)]


def _latent_shapes(model: DecoderConfig, mla: MlaConfig) -> list[tuple[int, int]]:
    query, down = model.num_heads * (mla.plain + mla.rotated), mla.latent + mla.rotated
    out = (model.hidden_size, model.num_heads * mla.value)
    if mla.query_latent is None:
        return [(query + down, model.hidden_size), out]
    return [(mla.query_latent + down, model.hidden_size), (query, mla.query_latent), out]


def weight_count(model: DecoderConfig, *, active: bool = False) -> int:
    """Numbers in the model's tensors.

    Args:
        active: counts the experts that one token chooses instead of all.
    """
    if model.num_parameters is not None:
        return model.num_parameters
    attention = _attention_count(model) if model.mla is None else _latent_count(model, model.mla)
    halves, norm = 1 if _ungated(model) else 2, 2 if model.layer_norms and model.layer_norms.norm_bias else 1
    layer = attention + model.hidden_size * (norm * _num_norms(model) + model.out_bias)
    wide = (halves + 1) * model.hidden_size + halves * model.mlp_bias
    plain = wide * model.intermediate_size + model.hidden_size * model.mlp_bias
    sparse = sum(model.moe.layers) if model.moe is not None else 0
    layers = model.num_layers * layer + (model.num_layers - sparse) * plain
    if model.moe is not None:
        layers += sparse * _experts_count(model.moe, model.hidden_size, model.moe.top_k if active else None)
    tables = 2 if model.head == "lm" and not model.tie_word_embeddings else 1
    head_bias = model.vocab_size * model.head_bias
    return layers + (tables * model.vocab_size + norm + model.num_labels) * model.hidden_size + head_bias


def _ungated(model: DecoderConfig) -> bool:
    return model.layer_norms is not None and model.layer_norms.ungated is not None


def _experts_count(moe: MoeConfig, hidden: int, chosen: int | None) -> int:
    """Numbers in one layer's router and experts, of which only the `chosen` ones count."""
    expert = 3 * hidden * moe.intermediate_size + (2 * moe.intermediate_size + hidden) * moe.bias
    router = moe.num_experts * (hidden + moe.bias + moe.choice_bias)
    shared = 3 * hidden * moe.shared_size + hidden * moe.shared_gate
    return router + (moe.num_experts if chosen is None else chosen) * expert + shared


def _attention_count(model: DecoderConfig) -> int:
    """Numbers in one layer's attention, without biases of its last product."""
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    count = model.hidden_size * (2 * heads + 2 * kv_heads) + (heads + 2 * kv_heads) * model.qkv_bias
    norms = {"none": 0, "head": 2 * model.head_dim, "full": heads + kv_heads}[model.qk_norm]
    return count + norms + model.num_heads * model.attention_sinks


def _latent_count(model: DecoderConfig, mla: MlaConfig) -> int:
    """Numbers in one layer's latent attention, without biases of its last product."""
    query = model.num_heads * (mla.plain + mla.rotated)
    first = query if mla.query_latent is None else mla.query_latent
    count = (model.hidden_size + model.qkv_bias) * (first + mla.latent + mla.rotated) + mla.latent
    count += model.num_heads * (mla.plain + mla.value) * mla.latent + model.num_heads * mla.value * model.hidden_size
    return count if mla.query_latent is None else count + mla.query_latent * (query + 1)


def _num_norms(model: DecoderConfig) -> int:
    return sum(name is not None for name in msgspec.structs.astuple(model.norms))
