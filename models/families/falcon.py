"""Falcon: attention and feed-forward side by side, and no gate; keys and values of few heads."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock, LayerNorms
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("FalconForCausalLM",)
BARE, CLASSIFIERS = ("FalconModel",), ("FalconForSequenceClassification",)
BUILT = {"alibi": False, "apply_residual_connection_post_layernorm": False}
"""The only values that are built."""
NAMES = (
    ("model.embed_tokens", "transformer.word_embeddings"), ("model.layers.", "transformer.h."),
    ("model.norm", "transformer.ln_f"), (".self_attn.qkv_proj", ".self_attention.query_key_value"),
    (".self_attn.o_proj", ".self_attention.dense"), (".mlp.up_proj", ".mlp.dense_h_to_4h"),
    (".mlp.down_proj", ".mlp.dense_4h_to_h"),
)  # fmt: skip


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    for key, value in BUILT.items():
        if reader.flag(key, value) != value:
            raise reader.refuse(key, f"must be {str(value).lower()}")
    newer, heads = reader.flag("new_decoder_architecture", False), reader.integer("num_attention_heads")
    shared = reader.flag("multi_query", True) and not newer
    parallel, bias = newer or reader.flag("parallel_attn", True), reader.flag("bias", False)
    if newer and not reader.flag("parallel_attn", True):
        raise reader.refuse("parallel_attn", "must be true with new_decoder_architecture")
    hidden = reader.integer("hidden_size")
    usual = reader.with_defaults(max_position_embeddings=2048, tie_word_embeddings=True).with_values(
        num_key_value_heads=1 if shared else reader.integer("num_kv_heads", heads),
        intermediate_size=reader.integer("ffn_hidden_size", 4 * hidden),
        rms_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
    )
    reader.choice("activation", ("gelu",), "gelu")
    plain = decoder_config(usual, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    norms = LayerNorms(before_feed_forward=None) if parallel else LayerNorms()
    if newer and reader.integer("num_ln_in_parallel_attn", 2) == 2:
        norms = LayerNorms(before_attention="ln_attn", before_feed_forward="ln_mlp")
    return msgspec.structs.replace(
        plain,
        norms=norms,
        layer_norms=LayerNormBlock(parallel=parallel, ungated="gelu"),
        qkv_name="qkv_proj",
        qkv_by_group=True,
        renamed=NAMES,
    )
