"""Llama: the plain decoder. `attention_bias` and `mlp_bias` add biases to all projections of their layer; InternLM 3's
`qkv_bias` overrides the former for query, key and value.
"""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("LlamaForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    return decoder_config(
        reader, qkv_bias=reader.flag("qkv_bias", bias), out_bias=bias, mlp_bias=reader.flag("mlp_bias", False)
    )
