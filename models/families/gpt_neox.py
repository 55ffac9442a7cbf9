"""GPT-NeoX and Pythia: attention and feed-forward side by side or in turn, no gate, a rotated part of each head."""

from typing import Literal

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("GPTNeoXForCausalLM",)
NAMES = (
    ("model.embed_tokens", "gpt_neox.embed_in"), ("model.layers.", "gpt_neox.layers."),
    ("model.norm", "gpt_neox.final_layer_norm"), (".self_attn.qkv_proj", ".attention.query_key_value"),
    (".self_attn.o_proj", ".attention.dense"), (".mlp.up_proj", ".mlp.dense_h_to_4h"),
    (".mlp.down_proj", ".mlp.dense_4h_to_h"), ("lm_head", "embed_out"),
)  # fmt: skip
GELUS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""Names of the two forms: exact, and by a tangent."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", True)
    usual = reader.with_defaults(
        rope_theta=reader.number("rotary_emb_base", 10000.0), partial_rotary_factor=reader.number("rotary_pct", 0.25)
    ).with_values(
        rms_norm_eps=reader.number("layer_norm_eps", 1e-5), num_key_value_heads=reader.integer("num_attention_heads")
    )
    plain = decoder_config(usual, qkv_bias=bias, out_bias=bias, mlp_bias=True, activation="silu", rotary=1.0)
    return msgspec.structs.replace(
        plain,
        layer_norms=LayerNormBlock(
            parallel=reader.flag("use_parallel_residual", True),
            ungated=GELUS[reader.choice("hidden_act", tuple(GELUS), "gelu")],
        ),
        qkv_name="qkv_proj",
        qkv_by_group=True,
        renamed=NAMES,
    )
