"""OLMo 2: Llama with norms behind both parts of a layer instead of before them, and over whole queries and keys."""

import msgspec

from troupellm.models.decoder_config import DecoderConfig, LayerNorms
from troupellm.models.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("Olmo2ForCausalLM",)
NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def describe(reader: ConfigReader) -> DecoderConfig:
    """What config.json says about this family."""
    reader = reader.with_defaults(rms_norm_eps=1e-5)
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="full")
    return msgspec.structs.replace(plain, norms=NORMS)
