"""Gemma 2: norms before and after attention and feed-forward, soft-capped scores and logits, a window in every
other layer."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms
from troupellm.models.config.hf_config import ACTIVATIONS, ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("Gemma2ForCausalLM",)
NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
DEFAULTS = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    refuse_both_directions(reader)
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(
        reader,
        qkv_bias=bias,
        out_bias=bias,
        windows=windows_but_every(reader, 2),
        activation=ACTIVATIONS[reader.choice("hidden_activation", tuple(ACTIVATIONS))],
    )
    return msgspec.structs.replace(
        plain,
        norms=NORMS,
        norm_offset=1.0,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=reader.optional("attn_logit_softcapping") or 0.0,
        logit_softcap=reader.optional("final_logit_softcapping") or 0.0,
    )


def windows_but_every(reader: ConfigReader, period: int) -> tuple[int | None, ...]:
    """`sliding_window` in all layers but each `period`-th; `layer_types` overrides."""
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    num_layers = reader.integer("num_hidden_layers")
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def refuse_both_directions(reader: ConfigReader) -> None:
    """Raises ModelLoadError for an encoder in a decoder's clothes."""
    if reader.flag("use_bidirectional_attention", False):
        raise reader.refuse("use_bidirectional_attention", "must be false")
