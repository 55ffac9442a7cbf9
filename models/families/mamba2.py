"""Mamba-2 (Dao and Gu, 2024): state-space layers alone, without attention and without feed-forward parts.

Such a model has no limit of positions; prompts are cut off where training mostly ended.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms, SsdConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.config.ssd_keys import groups_of, step_limits

ARCHITECTURES = ("Mamba2ForCausalLM",)
LONGEST = 131072
HEAD_DIM = 64
"""Of the attention that there is none of: blocks of the KV cache name prefixes, and are no smaller than this."""
NAMES = (
    (".mamba.", ".mixer."),
    ("embed_tokens.", "embeddings."),
    ("backbone.norm.", "backbone.norm_f."),
    ("model.norm.", "model.norm_f."),
)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader.choice("hidden_act", ("silu", "swish"), "silu")
    usual = reader.with_values(
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        intermediate_size=reader.integer("hidden_size"),
        rms_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=reader.integer("max_position_embeddings", LONGEST),
        num_hidden_layers=reader.integer("num_hidden_layers", 64),
    )
    heads, size = reader.integer("num_heads", 128), reader.integer("head_dim", 64)
    width = reader.integer("expand", 2) * reader.integer("hidden_size")
    if heads * size != width:
        raise reader.refuse("num_heads", f"times head_dim must be {width}, expand times hidden_size")
    least, most = step_limits(reader)
    plain = decoder_config(usual).with_layers(mixer="ssd", rope=None, intermediate_size=0)
    return msgspec.structs.replace(
        plain,
        single_parts=True,
        norms=LayerNorms(before_attention="norm", before_feed_forward=None),
        renamed=NAMES,
        ssd=SsdConfig(
            heads=heads,
            head_size=size,
            groups=groups_of(reader, "n_groups", 8, "num_heads", heads),
            state_size=reader.integer("state_size", 128),
            taps=reader.integer("conv_kernel", 4, least=2),
            conv_bias=reader.flag("use_conv_bias", True),
            bias=reader.flag("use_bias", False),
            least_step=least,
            most_step=most,
        ),
    )
