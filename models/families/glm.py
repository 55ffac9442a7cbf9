"""GLM-4: Llama that rotates adjacent pairs in a part of each head; the later generation also norms the results of
attention and feed-forward."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

FIRST, SECOND = "GlmForCausalLM", "Glm4ForCausalLM"
ARCHITECTURES = (FIRST, SECOND)
NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm")
"""Norms of the later generation."""
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True}
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    plain = decoder_config(reader, qkv_bias=reader.flag("attention_bias", True), rotary=0.5)
    return msgspec.structs.replace(
        plain,
        norms=NORMS if architecture_of(reader).startswith("Glm4") else plain.norms,
        rope_interleaved=True,
        gate_up_name="gate_up_proj",
    )
