"""Qwen3: Llama with a norm on every query and key head before the rotation; windows as in Qwen2."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.qwen2 import upper_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    return decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=upper_windows(reader))
