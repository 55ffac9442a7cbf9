"""Counts a model's parameters, and its matrix products, from its configuration."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, MlaConfig, MoeConfig


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
    hidden, halves = model.hidden_size, 1 if _ungated(model) else 2
    for shape, number in Counter(model.layers).items():
        for rows, columns in _mixer_shapes(model, shape):
            yield Product(number, rows, columns)
        gated = [] if _sparse(shape) or not shape.intermediate_size else [(number, shape.intermediate_size, False)]
        if (moe := shape.experts) is not None:
            gated += [(number * moe.num_experts, moe.intermediate_size, True), (number, moe.shared_size, False)]
        for count, size, experts in gated:
            yield Product(count, halves * size, hidden, experts, gate_up=halves == 2)
            yield Product(count, hidden, size, experts)
    if (inputs := model.layer_inputs) is not None:
        yield Product(model.num_layers, inputs.size, hidden)
        yield Product(model.num_layers, hidden, inputs.size)
        yield Product(1, model.num_layers * inputs.size, hidden)
    if model.head == "lm":
        yield Product(1, model.vocab_size, hidden, head=True)


def _mixer_shapes(model: DecoderConfig, shape: LayerShape) -> list[tuple[int, int]]:
    if shape.mixer == "none":
        return []
    if shape.mixer == "short_conv":
        return [(3 * model.hidden_size, model.hidden_size), (model.hidden_size, model.hidden_size)]
    if shape.mixer == "gated_delta" and (delta := model.gated_delta) is not None:
        values = delta.value_heads * delta.value_size
        return [(delta.channels + values, model.hidden_size), (model.hidden_size, values)]
    if shape.mixer == "ssd" and (ssd := model.ssd) is not None:
        return [(ssd.width + ssd.channels + ssd.heads, model.hidden_size), (model.hidden_size, ssd.width)]
    return _attention_shapes(model, shape) if model.mla is None else _latent_shapes(model, shape, model.mla)


def _attention_shapes(model: DecoderConfig, shape: LayerShape) -> list[tuple[int, int]]:
    inputs = sum(model.query_key_value(shape).values())
    return [(inputs, model.hidden_size), (model.hidden_size, shape.mixed_width)]


def _latent_shapes(model: DecoderConfig, shape: LayerShape, mla: MlaConfig) -> list[tuple[int, int]]:
    query, down = shape.num_heads * (mla.plain + mla.rotated), mla.latent + mla.rotated
    out = (model.hidden_size, shape.num_heads * mla.value)
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
    norm = 2 if model.layer_norms and model.layer_norms.norm_bias else 1
    layers = sum(
        number * (_layer_count(model, shape, active=active) + norm * _num_norms(model) * model.hidden_size)
        for shape, number in Counter(model.layers).items()
    )
    tables = 2 if model.head == "lm" and not model.tie_word_embeddings else 1
    head_bias = model.vocab_size * model.head_bias
    if (inputs := model.layer_inputs) is not None:
        wide = model.num_layers * inputs.size
        layers += wide * (inputs.vocab_size + model.hidden_size) + inputs.size
    return layers + (tables * model.vocab_size + norm + model.num_labels) * model.hidden_size + head_bias


def _layer_count(model: DecoderConfig, shape: LayerShape, *, active: bool) -> int:
    """Numbers in one layer without the norms around its parts."""
    hidden, halves = model.hidden_size, 1 if _ungated(model) else 2
    count = _mixer_count(model, shape) + model.layer_scalar
    if (moe := shape.experts) is not None:
        count += _experts_count(moe, hidden, moe.top_k if active else None)
        count += moe.beside_dense * (4 * hidden + moe.num_experts)
    if (inputs := model.layer_inputs) is not None:
        count += (2 * inputs.size + 1) * hidden
    wide = (halves + 1) * hidden + halves * model.mlp_bias
    return (
        count
        if _sparse(shape) or not shape.intermediate_size
        else count + wide * shape.intermediate_size + hidden * model.mlp_bias
    )


def _sparse(shape: LayerShape) -> bool:
    """True if there are experts alone."""
    return shape.experts is not None and not shape.experts.beside_dense


def _mixer_count(model: DecoderConfig, shape: LayerShape) -> int:
    """Numbers in the part of a layer that mixes positions."""
    hidden = model.hidden_size
    if shape.mixer == "none":
        return 0
    if shape.mixer == "short_conv" and (conv := model.short_conv) is not None:
        return hidden * (4 * hidden + conv.taps + 5 * conv.bias)
    if shape.mixer == "gated_delta" and (delta := model.gated_delta) is not None:
        heads, values = delta.value_heads, delta.value_heads * delta.value_size
        products = hidden * (delta.channels + 2 * values + 2 * heads)
        return products + delta.taps * delta.channels + 2 * heads + delta.value_size
    if shape.mixer == "ssd" and (ssd := model.ssd) is not None:
        outputs = ssd.width + ssd.channels + ssd.heads
        products = hidden * (outputs + ssd.width) + (outputs + hidden) * ssd.bias
        return products + (ssd.taps + ssd.conv_bias) * ssd.channels + 3 * ssd.heads + ssd.width
    attention = _attention_count(model, shape) if model.mla is None else _latent_count(model, shape, model.mla)
    return attention + hidden * (model.out_bias + shape.query_width * model.attention_gate)


def _ungated(model: DecoderConfig) -> bool:
    return model.single_parts or (model.layer_norms is not None and model.layer_norms.ungated is not None)


def _experts_count(moe: MoeConfig, hidden: int, chosen: int | None) -> int:
    """Numbers in one layer's router and experts, of which only the `chosen` ones count."""
    expert = 3 * hidden * moe.intermediate_size + (2 * moe.intermediate_size + hidden) * moe.bias
    router = moe.num_experts * (hidden + moe.bias + moe.choice_bias)
    shared = 3 * hidden * moe.shared_size + hidden * moe.shared_gate
    return router + (moe.num_experts if chosen is None else chosen) * expert + shared


def _attention_count(model: DecoderConfig, shape: LayerShape) -> int:
    """Numbers in one layer's attention, without biases of its last product."""
    heads, kv_heads = shape.query_width, 0 if shape.kv_from is not None else shape.key_width
    inputs = sum(model.query_key_value(shape).values())
    count = model.hidden_size * (inputs + shape.mixed_width) + inputs * model.qkv_bias
    norms = {"head": (1 + (kv_heads > 0)) * shape.head_dim, "full": heads + kv_heads}.get(model.qk_norm, 0)
    return count + norms + shape.num_heads * shape.sinks


def _latent_count(model: DecoderConfig, shape: LayerShape, mla: MlaConfig) -> int:
    """Numbers in one layer's latent attention, without biases of its last product."""
    query = shape.num_heads * (mla.plain + mla.rotated)
    first = query if mla.query_latent is None else mla.query_latent
    count = (model.hidden_size + model.qkv_bias) * (first + mla.latent + mla.rotated) + mla.latent
    count += shape.num_heads * (mla.plain + mla.value) * mla.latent + shape.num_heads * mla.value * model.hidden_size
    return count if mla.query_latent is None else count + mla.query_latent * (query + 1)


def _num_norms(model: DecoderConfig) -> int:
    return sum(name is not None for name in msgspec.structs.astuple(model.norms))
