"""Nemotron-H and Nemotron Nano 2: layers of one part each, a state space, attention without rotation, or squared ReLUs.

Layers with experts (Nemotron 3) are refused by name.
"""

import math

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms, SsdConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.config.ssd_keys import groups_of
from troupellm.models.families.mamba2 import NAMES

ARCHITECTURES = ("NemotronHForCausalLM",)
LETTERS = {"M": "ssd", "*": "attention", "-": "none"}
"""Of `hybrid_override_pattern`."""
KINDS = {"linear_attention": "ssd", "mamba": "ssd", "full_attention": "attention", "attention": "attention"} | {
    "mlp": "none"
}


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader.choice("mlp_hidden_act", ("relu2",), "relu2")
    reader.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    mixers = _mixers(reader)
    size = reader.integer("intermediate_size", 21504)
    bias = reader.flag("attention_bias", False)
    usual = reader.with_values(
        num_hidden_layers=len(mixers),
        intermediate_size=size,
        rms_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
    )
    plain = decoder_config(
        usual, qkv_bias=bias, out_bias=bias, mlp_bias=reader.flag("mlp_bias", False), activation="silu"
    )
    plain = plain.with_layers(
        mixer=mixers, rope=None, intermediate_size=tuple(size if mixer == "none" else 0 for mixer in mixers)
    )
    return msgspec.structs.replace(
        plain,
        single_parts=True,
        norms=LayerNorms(before_attention="norm", before_feed_forward=None),
        renamed=(*NAMES, (".self_attn.", ".mixer."), (".mlp.", ".mixer.")),
        ssd=_ssd(reader),
    )


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Per layer, the part that mixes its positions; `none` has a feed-forward part."""
    for key in ("layers_block_type", "layer_types"):
        kinds = reader.values.get(key)
        if kinds:
            break
    else:
        key, kinds = "hybrid_override_pattern", reader.values.get("hybrid_override_pattern")
        kinds = list(kinds) if isinstance(kinds, str) else None
    known = LETTERS if key == "hybrid_override_pattern" else KINDS
    if not isinstance(kinds, list) or not kinds:
        raise reader.refuse(key, "must name the part of each layer")
    for kind in kinds:
        if kind in ("E", "moe"):
            raise reader.refuse(key, "has layers with experts, which are not supported for this architecture")
        if kind not in known:
            raise reader.refuse(key, f"may hold {', '.join(known)}")
    mixers = tuple(known[kind] for kind in kinds)
    if "ssd" not in mixers:
        raise reader.refuse(key, "must name a state-space layer at least once")
    return mixers


def _ssd(reader: ConfigReader) -> SsdConfig:
    heads = reader.integer("mamba_num_heads", 128)
    return SsdConfig(
        heads=heads,
        head_size=reader.integer("mamba_head_dim", 64),
        groups=groups_of(reader, "n_groups", 8, "mamba_num_heads", heads),
        state_size=reader.integer("ssm_state_size", 128),
        taps=reader.integer("conv_kernel", 4, least=2),
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias", False),
        least_step=reader.number("time_step_min", 0.001),
        most_step=math.inf,
    )
