"""StarCoder 2: layer norms, a GELU without a gate, biases everywhere, and a window in all layers or none."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.gpt_neox import GELUS

ARCHITECTURES = ("Starcoder2ForCausalLM",)
NAMES = ((".mlp.up_proj", ".mlp.c_fc"), (".mlp.down_proj", ".mlp.c_proj"))


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("use_bias", True)
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    usual = reader.with_defaults(tie_word_embeddings=True, num_key_value_heads=2)
    plain = decoder_config(
        usual.with_values(rms_norm_eps=reader.number("norm_epsilon", 1e-5)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation="silu",
        windows=(window,) * reader.integer("num_hidden_layers"),
    )
    gelu = GELUS[reader.choice("hidden_act", tuple(GELUS), "gelu_pytorch_tanh")]
    return msgspec.structs.replace(plain, layer_norms=LayerNormBlock(ungated=gelu), renamed=NAMES)
