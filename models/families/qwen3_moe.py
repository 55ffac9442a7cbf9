"""Qwen3-MoE: Qwen3 with experts; if it has a window, all layers have it. Qwen3-VL stores all experts of a layer in one
tensor, inputs before outputs, and always makes the weights of a token's experts add up to one.
"""

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.expert_config import expert_counts, sparse_layers
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
WITH_IMAGES = "qwen3_vl_moe_text"


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    windowed = reader.flag("use_sliding_window", False) and reader.is_on("sliding_window")
    window = reader.integer("sliding_window") if windowed else None
    windows = (window,) * reader.integer("num_hidden_layers")
    config = decoder_config(reader, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=windows)
    num_experts, top_k = expert_counts(reader, 128, 8)
    with_images = reader.values.get("model_type") == WITH_IMAGES
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size", 768),
        renormalize=reader.flag("norm_topk_prob", with_images),
        names=ExpertNames(transposed=with_images),
    )
    return config.with_layers(experts=tuple(moe if sparse else None for sparse in sparse_layers(reader)))
