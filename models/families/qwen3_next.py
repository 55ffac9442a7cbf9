"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, gated attention in the others, and norms around 1."""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, GatedDeltaConfig, MoeConfig
from troupellm.models.config.expert_config import expert_counts, sparse_layers
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

NEXT = "Qwen3NextForCausalLM"
ARCHITECTURES = (NEXT, "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
ATTENTION, LINEAR = "full_attention", "linear_attention"
DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4, "norm_topk_prob": True,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    reader = reader.with_defaults(**DEFAULTS)
    if reader.flag("attention_bias", False):
        raise reader.refuse("attention_bias", "must be false")
    if not reader.flag("attn_output_gate", True):
        raise reader.refuse("attn_output_gate", "must be true")
    sparse = architecture_of(reader) == NEXT or "Moe" in architecture_of(reader)
    if sparse:
        reader = reader.with_defaults(intermediate_size=5632)
    plain = decoder_config(reader, qk_norm="head", rotary=0.25).with_layers(mixer=_mixers(reader))
    if sparse:
        plain = plain.with_layers(experts=_experts(reader))
    delta = GatedDeltaConfig(
        key_heads=reader.integer("linear_num_key_heads"),
        value_heads=reader.integer("linear_num_value_heads"),
        key_size=reader.integer("linear_key_head_dim"),
        value_size=reader.integer("linear_value_head_dim"),
        taps=reader.integer("linear_conv_kernel_dim", least=2),
        grouped=architecture_of(reader) == NEXT,
    )
    if delta.value_heads % delta.key_heads:
        raise reader.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads ({delta.key_heads})")
    return msgspec.structs.replace(plain, gated_delta=delta, attention_gate=True, norm_offset=1.0)


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    num_experts, top_k = expert_counts(reader, 512, 10)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size"),
        renormalize=reader.flag("norm_topk_prob", True),
        shared_size=reader.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return tuple(moe if sparse else None for sparse in sparse_layers(reader))


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Per layer, the part that mixes its positions."""
    num_layers, interval = reader.integer("num_hidden_layers"), reader.integer("full_attention_interval")
    kinds = reader.values.get("layer_types")
    if kinds is None:
        kinds = [LINEAR if (layer + 1) % interval else ATTENTION for layer in range(num_layers)]
    known = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in (ATTENTION, LINEAR) for kind in kinds)
    if not known:
        raise reader.refuse("layer_types", f"must be a list of {num_layers} names, {ATTENTION} or {LINEAR}")
    if ATTENTION not in kinds:
        raise reader.refuse("layer_types", f"must name {ATTENTION} at least once")
    return tuple("attention" if kind == ATTENTION else "gated_delta" for kind in kinds)
