"""Granite: Llama with factors on embeddings, attention scores, additions to the residual, and logits."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("GraniteForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, mlp_bias=reader.flag("mlp_bias", False))
    return msgspec.structs.replace(
        plain,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        scale_inputs=True,
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )
