"""Nemotron 3 8B, 4 and Minitron: norms that leave out one, squared ReLUs without a gate, half of each head rotated."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("NemotronForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader.choice("hidden_act", ("relu2",), "relu2")
    bias = reader.flag("attention_bias", False)
    usual = reader.with_values(rms_norm_eps=reader.number("norm_eps", 1e-5))
    plain = decoder_config(
        usual,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        activation="silu",
        rotary=0.5,
    )
    return msgspec.structs.replace(plain, norm_offset=1.0, layer_norms=LayerNormBlock(ungated="relu2"))
