"""EXAONE 4: OLMo 2's norms behind each part, a norm on every query and key head, and no rotation in layers that see
everything if others have a window. Its model with experts has Llama's norms and the router of DeepSeek V3.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config, layer_windows
from troupellm.models.families import olmo2
from troupellm.models.families.deepseek import behind_dense, routed_experts
from troupellm.models.families.gemma2 import windows_but_every

ARCHITECTURES = ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM")
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
EXPERTS: dict[str, Any] = {
    "num_experts": 64, "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
NAMES = ExpertNames(shared="shared_experts", choice_bias="e_score_correction_bias")
SPARSE = ("dense", "sparse")


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    reader = reader.with_defaults(**DEFAULTS)
    windows = _windows(reader)
    plain = decoder_config(reader, qk_norm="head", windows=windows)
    if reader.is_on("sliding_window"):  # then layers without a window are not rotated
        plain = plain.with_layers(rope=tuple(None if shape.window is None else shape.rope for shape in plain.layers))
    if "Moe" in architecture_of(reader):
        return plain.with_layers(experts=_experts(reader))
    return msgspec.structs.replace(plain, norms=olmo2.NORMS)


def _windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """`layer_types`, else a window but in each `sliding_window_pattern`-th layer, or by a text of L for local and G for
    global ones, after which the last layer is global in any case."""
    num_layers, pattern = reader.integer("num_hidden_layers"), reader.values.get("sliding_window_pattern")
    if not reader.is_on("sliding_window"):
        return (None,) * num_layers
    window = reader.integer("sliding_window")
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    if not isinstance(pattern, str):
        return windows_but_every(reader, reader.integer("sliding_window_pattern"))
    if set(pattern) - {"L", "G"}:
        raise reader.refuse("sliding_window_pattern", "must be a number, or a text of L and G")
    local = (pattern[layer % len(pattern)] == "L" for layer in range(num_layers - 1))
    return (*(window if near else None for near in local), None)


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    reader = reader.with_defaults(**EXPERTS)
    counts = {"n_routed_experts": reader.integer("num_experts")}
    counts["n_shared_experts"] = reader.integer("num_shared_experts", least=0)
    moe = msgspec.structs.replace(routed_experts(reader.with_values(**counts), third=True), names=NAMES)
    if not reader.is_on("mlp_layer_types"):
        return behind_dense(reader, moe)
    kinds, num_layers = reader.values["mlp_layer_types"], reader.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in SPARSE for kind in kinds):
        raise reader.refuse("mlp_layer_types", f"must be a list of {num_layers} times dense or sparse")
    return tuple(moe if kind == SPARSE[1] else None for kind in kinds)
