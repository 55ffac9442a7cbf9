"""Seed-OSS: Llama with biases on query, key and value, whose output has a switch of its own."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("SeedOssForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(head_dim=128, num_key_value_heads=8)
    return decoder_config(
        reader,
        qkv_bias=reader.flag("attention_bias", True),
        out_bias=reader.flag("attention_out_bias", False),
        mlp_bias=reader.flag("mlp_bias", False),
    )
