"""MiMo-V2-Flash: the router of DeepSeek V3; layers with a window have twice the key heads, sinks and a rotation of
their own. Values are narrower than keys, and scaled.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, MoeConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows, scaled_rope
from troupellm.models.families.deepseek import routed_experts

ARCHITECTURES = ("MiMoV2FlashForCausalLM",)
DEFAULTS: dict[str, Any] = {
    "head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4, "sliding_window": 129, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "rope_theta": 5_000_000.0, "swa_rope_theta": 10_000.0, "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True, "attention_value_scale": 0.707,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
FULL, SLIDING = "full_attention", "sliding_attention"
SAME = ("num_attention_heads", "head_dim", "v_head_dim")
"""Keys that have a second value for layers with a window in published files, which must be the same."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = _usual(reader.with_defaults(**DEFAULTS))
    windows = layer_windows(reader, reader.integer("sliding_window"))
    bias = reader.flag("attention_bias", False)
    head_dim, value_dim = reader.integer("head_dim"), reader.integer("v_head_dim")
    if value_dim > head_dim:
        raise reader.refuse("v_head_dim", f"must be at most head_dim ({head_dim})")
    rotary_dim = _rotary_dim(reader, head_dim)
    ropes = {
        kind: scaled_rope(reader, section, section.number("rope_theta"), rotary_dim)
        for kind, section in ((kind, reader.section("rope_parameters").section(kind)) for kind in (FULL, SLIDING))
    }
    kv_heads = reader.integer("num_key_value_heads")
    near_heads = reader.integer("swa_num_key_value_heads", 2 * kv_heads)
    if reader.integer("num_attention_heads") % near_heads:
        raise reader.refuse("num_attention_heads", f"must be a multiple of {near_heads}, the key heads in a window")
    plain = decoder_config(reader, qkv_bias=bias, windows=windows, rope=ropes[FULL])
    scale = reader.optional("attention_value_scale") or 1.0
    sinks = reader.flag("add_swa_attention_sink_bias", True)
    return msgspec.structs.replace(plain, value_scale=scale).with_layers(
        value_dim=None if value_dim == head_dim else value_dim,
        rotary_dim=rotary_dim,
        rope=tuple(ropes[FULL if window is None else SLIDING] for window in windows),
        num_kv_heads=tuple(kv_heads if window is None else near_heads for window in windows),
        sinks=tuple(sinks and window is not None for window in windows),
        experts=_experts(reader),
    )


def _usual(reader: ConfigReader) -> ConfigReader:
    """The published file's keys under the names of `transformers`."""
    for key in SAME:
        if reader.has(f"swa_{key}") and reader.integer(f"swa_{key}") != reader.integer(key):
            raise reader.refuse(f"swa_{key}", f"must be {key} ({reader.integer(key)})")
    if reader.flag("add_full_attention_sink_bias", False):
        raise reader.refuse("add_full_attention_sink_bias", "must be false")
    if reader.is_on("n_shared_experts"):
        raise reader.refuse("n_shared_experts", "must be null or 0")
    reader = reader.with_values(
        n_shared_experts=0,
        rms_norm_eps=reader.number("layernorm_epsilon", reader.number("rms_norm_eps", 1e-5)),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
    )
    if reader.has("sliding_window_size"):  # the tokens before the one that sees them
        reader = reader.with_values(sliding_window=reader.integer("sliding_window_size") + 1)
    count = reader.integer("num_hidden_layers")
    kinds = _kinds(reader, "hybrid_layer_pattern", (FULL, SLIDING))
    usual = [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(count)]
    sparse = _kinds(reader, "moe_layer_freq", ("dense", "sparse"))
    part = reader.number("partial_rotary_factor")
    ropes = {
        kind: {"rope_type": "default", "rope_theta": reader.number(key), "partial_rotary_factor": part}
        for kind, key in ((FULL, "rope_theta"), (SLIDING, "swa_rope_theta"))
    }
    return reader.with_defaults(
        layer_types=kinds or usual,
        mlp_layer_types=sparse or ["dense", *["sparse"] * (count - 1)],
        rope_parameters=ropes,
    )


def _kinds(reader: ConfigReader, key: str, names: tuple[str, str]) -> list[str]:
    """A list of zeros and ones, of the length of the model, as names; empty where there is none."""
    if not reader.is_on(key):
        return []
    listed, count = reader.values[key], reader.integer("num_hidden_layers")
    if not isinstance(listed, list) or len(listed) != count or any(flag not in (0, 1) for flag in listed):
        raise reader.refuse(key, f"must be a list of {count} zeros and ones")
    return [names[int(flag)] for flag in listed]


def _rotary_dim(reader: ConfigReader, head_dim: int) -> int:
    """The same in both rotations."""
    both = reader.section("rope_parameters")
    sizes = {
        int(head_dim * both.section(kind).number("partial_rotary_factor", reader.number("partial_rotary_factor")))
        for kind in (FULL, SLIDING)
    }
    size = min(sizes)
    if len(sizes) > 1 or not 0 < size <= head_dim or size % 2:
        raise both.refuse(FULL, f"must rotate an even part of head_dim ({head_dim}), the same as {SLIDING}")
    return size


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    kinds, count = reader.values["mlp_layer_types"], reader.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise reader.refuse("mlp_layer_types", f"must be a list of {count} times dense or sparse")
    moe = routed_experts(reader, third=True) if "sparse" in kinds else None
    return tuple(moe if kind == "sparse" else None for kind in kinds)
