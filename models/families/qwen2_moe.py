"""Qwen2-MoE: Qwen2 with experts, one of which all tokens share behind a gate of its own."""

from troupellm.models.config.decoder_config import DecoderConfig, MoeConfig
from troupellm.models.config.expert_config import expert_counts, sparse_layers
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    config = decoder_config(reader, qkv_bias=reader.flag("qkv_bias", True), windows=lower_windows(reader))
    num_experts, top_k = expert_counts(reader, 60, 4)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size", 1408),
        renormalize=reader.flag("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return config.with_layers(experts=tuple(moe if sparse else None for sparse in sparse_layers(reader)))


def lower_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Windows in every other layer below `max_window_layers` with `use_sliding_window`; `layer_types` overrides."""
    num_layers = reader.integer("num_hidden_layers")
    if not reader.flag("use_sliding_window", False) or not reader.is_on("sliding_window"):
        return (None,) * num_layers
    window = reader.integer("sliding_window")
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    end = reader.integer("max_window_layers", 28, least=0)
    return tuple(window if layer < end and layer % 2 == 0 else None for layer in range(num_layers))
