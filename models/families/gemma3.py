"""Gemma 3: Gemma 2 with normed queries and keys instead of caps, and a rotation of its own in layers with a window."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, RopeConfig
from troupellm.models.config.hf_config import (
    ACTIVATIONS,
    ConfigReader,
    check_older_rope,
    decoder_config,
    scaled_rope,
)
from troupellm.models.families import gemma2

ARCHITECTURES = ("Gemma3ForCausalLM",)
BARE = ("Gemma3TextModel",)
CLASSIFIERS = ("Gemma3TextForSequenceClassification",)
DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    gemma2.refuse_both_directions(reader)
    if reader.is_on("attn_logit_softcapping"):
        raise reader.refuse("attn_logit_softcapping", "must be null")
    windows = gemma2.windows_but_every(reader, reader.integer("sliding_window_pattern"))
    everywhere, nearby = _ropes(reader)
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(
        reader,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        windows=windows,
        activation=ACTIVATIONS[reader.choice("hidden_activation", tuple(ACTIVATIONS))],
        rope=everywhere,
    )
    return msgspec.structs.replace(
        plain,
        norms=gemma2.NORMS,
        norm_offset=1.0,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=reader.optional("final_logit_softcapping") or 0.0,
    ).with_layers(rope=tuple(everywhere if window is None else nearby for window in windows))


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers that see everything and of those with a window.

    Older files scale the former in `rope_scaling` and name their bases `rope_theta` and `rope_local_base_freq`, which
    count for newer ones that leave them out.
    """
    size, both = reader.integer("head_dim"), reader.section("rope_parameters")
    theta, local = reader.number("rope_theta", GLOBAL_THETA), reader.number("rope_local_base_freq", LOCAL_THETA)
    if not both.values:
        return scaled_rope(reader, reader.section("rope_scaling"), theta, size), RopeConfig(theta=local)
    if not (both.has("full_attention") or both.has("sliding_attention")):
        raise reader.refuse("rope_parameters", "must have full_attention and sliding_attention")
    check_older_rope(reader, both.section("full_attention"))
    full, sliding = both.section("full_attention"), both.section("sliding_attention")
    return (
        scaled_rope(reader, full, full.number("rope_theta", theta), size),
        scaled_rope(reader, sliding, sliding.number("rope_theta", local), size),
    )
