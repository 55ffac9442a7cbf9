"""OLMo 2: Llama with norms after attention and feed-forward instead of before, and over whole queries and keys.

OLMo 3 has a window in all layers except every fourth; layers with a window have an unscaled rotation.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms, RopeConfig
from troupellm.models.config.hf_config import (
    ConfigReader,
    architecture_of,
    check_older_rope,
    decoder_config,
    scaled_rope,
)
from troupellm.models.families.gemma2 import windows_but_every

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
THETA = 500_000.0


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(rms_norm_eps=1e-5)
    bias = reader.flag("attention_bias", False)
    if architecture_of(reader).startswith("Olmo2"):  # with a head of any kind
        plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="full")
        return msgspec.structs.replace(plain, norms=NORMS)
    windows = windows_but_every(reader.with_defaults(sliding_window=4096), 4)
    full, sliding = _ropes(reader)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="full", windows=windows, rope=full)
    ropes = tuple(full if window is None else sliding for window in windows)
    return msgspec.structs.replace(plain, norms=NORMS).with_layers(rope=ropes)


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers that see everything and of those with a window, which `rope_scaling` leaves alone."""
    head_dim = reader.integer("head_dim", reader.integer("hidden_size") // reader.integer("num_attention_heads"))
    theta, both = reader.number("rope_theta", THETA), reader.section("rope_parameters")
    if not both.values:
        return scaled_rope(reader, reader.section("rope_scaling"), theta, head_dim), RopeConfig(theta=theta)
    full, sliding = both.section("full_attention"), both.section("sliding_attention")
    if not full.values:
        raise reader.refuse("rope_parameters", "must have full_attention and sliding_attention")
    check_older_rope(reader, full)
    return (
        scaled_rope(reader, full, full.number("rope_theta", theta), head_dim),
        scaled_rope(reader, sliding, sliding.number("rope_theta", theta), head_dim),
    )
