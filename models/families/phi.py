"""Phi-1, 1.5 and 2: attention and feed-forward side by side behind one norm, without a gate, with biases everywhere."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock, LayerNorms
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.gpt_neox import GELUS

ARCHITECTURES = ("PhiForCausalLM",)
NAMES = (
    ("model.norm", "model.final_layernorm"), (".self_attn.o_proj", ".self_attn.dense"), (".mlp.up_proj", ".mlp.fc1"),
    (".mlp.down_proj", ".mlp.fc2"),
)  # fmt: skip


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    if reader.flag("qk_layernorm", False):
        raise reader.refuse("qk_layernorm", "must be false")
    usual = reader.with_values(rms_norm_eps=reader.number("layer_norm_eps", 1e-5))
    plain = decoder_config(usual, qkv_bias=True, out_bias=True, mlp_bias=True, activation="silu", rotary=0.5)
    gelu = GELUS[reader.choice("hidden_act", tuple(GELUS), "gelu_new")]
    return msgspec.structs.replace(
        plain,
        norms=LayerNorms(before_feed_forward=None),
        layer_norms=LayerNormBlock(parallel=True, ungated=gelu),
        head_bias=True,
        renamed=NAMES,
    )
