"""dots.llm1: Qwen3's attention, with the router of DeepSeek V3."""

from typing import Any

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows
from troupellm.models.families.deepseek import behind_dense, routed_experts

ARCHITECTURES = ("Dots1ForCausalLM",)
DEFAULTS: dict[str, Any] = {
    "sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    if reader.values.get("scoring_func") == "noaux_tc":  # so the published file calls the router as a whole
        reader = reader.without("scoring_func")
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=_windows(reader))
    return plain.with_layers(experts=behind_dense(reader, routed_experts(reader, third=True)))


def _windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """`layer_types`, else a window from layer `max_window_layers` up."""
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    first = reader.integer("max_window_layers", least=0)
    return tuple(window if layer >= first else None for layer in range(reader.integer("num_hidden_layers")))
