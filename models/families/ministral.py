"""Ministral 3 (with Devstral 2) and Mistral 4: beyond the trained context, queries grow with their position.

The one is Llama otherwise, the other DeepSeek-V3 with a softmax in its router and without the router's bias.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, QueryGrowth
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config, rope_section
from troupellm.models.families import deepseek

ARCHITECTURES = ("Ministral3ForCausalLM", "Mistral4ForCausalLM")
BETA = "llama_4_scaling_beta"
BESIDE = (BETA, "max_position_embeddings", "partial_rotary_factor")
"""Keys among those of the rotation that do not change it: the last is the share of a head that Mistral 4 rotates, which
its other keys give, too."""
LLAMA: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    section = rope_section(reader)
    if not section.values:  # the reference implementation would stretch one model's rotation
        raise reader.refuse("rope_parameters", "must describe the rotation")
    rotation = {key: value for key, value in section.values.items() if key not in BESIDE}
    plain = reader.without("rope_scaling").with_values(rope_parameters=rotation)
    model = _latent(plain.with_defaults(**LATENT)) if "Mistral4" in architecture_of(reader) else _llama(plain)
    growth = None
    if section.is_on(BETA):
        growth = QueryGrowth(beta=section.number(BETA), original=section.integer("original_max_position_embeddings"))
    return msgspec.structs.replace(model, query_growth=growth)


def _llama(reader: ConfigReader) -> DecoderConfig:
    reader = reader.with_defaults(**LLAMA)
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    return decoder_config(reader, windows=(window,) * reader.integer("num_hidden_layers"))


def _latent(reader: ConfigReader) -> DecoderConfig:
    reader.choice("scoring_func", ("softmax",), "softmax")
    third = deepseek.routed_experts(reader.without("scoring_func"), third=True)
    moe = msgspec.structs.replace(third, scoring="softmax", choice_bias=False, wide_router=False)
    return deepseek.latent_decoder(reader, moe, interleaved=reader.flag("rope_interleave", True))
