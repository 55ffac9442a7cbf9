"""GLM-4.5, 4.6 and 4.7: the router of DeepSeek V3 over grouped heads, of which the first half is rotated, in halves."""

from typing import Any

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.deepseek import behind_dense, routed_experts

ARCHITECTURES = ("Glm4MoeForCausalLM",)
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    plain = decoder_config(
        reader,
        qkv_bias=reader.flag("attention_bias", False),
        qk_norm="head" if reader.flag("use_qk_norm", False) else "none",
        rotary=0.5,
    )
    return plain.with_layers(experts=behind_dense(reader, routed_experts(reader, third=True)))
