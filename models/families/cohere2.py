"""Cohere 2 (Command R7B, Command A, Aya Expanse): attention and feed-forward side by side behind one norm, windows in
all layers but each fourth, which has no rotation.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock, LayerNorms
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.gemma2 import windows_but_every

ARCHITECTURES = ("Cohere2ForCausalLM",)
DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
BUILT = {"use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True}
"""The only values that are built."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    for key, value in BUILT.items():
        if reader.flag(key, value) != value:
            raise reader.refuse(key, f"must be {str(value).lower()}")
    windows = windows_but_every(reader, reader.integer("sliding_window_pattern"))
    bias = reader.flag("attention_bias", False)
    usual = reader.with_values(rms_norm_eps=reader.number("layer_norm_eps"))
    plain = decoder_config(usual, qkv_bias=bias, out_bias=bias, windows=windows)
    return msgspec.structs.replace(
        plain,
        norms=LayerNorms(before_feed_forward=None),
        layer_norms=LayerNormBlock(norm_bias=False, parallel=True),
        rope_interleaved=True,
        logit_scale=reader.number("logit_scale"),
    ).with_layers(rope=tuple(None if shape.window is None else shape.rope for shape in plain.layers))
