"""gpt-oss: experts behind a clamped gate, attention sinks, windows in every other layer.

Its checkpoints hold the experts in one tensor per projection: bfloat16, or MXFP4 as `_blocks` and `_scales`.
"""

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.expert_config import expert_counts
from troupellm.models.config.hf_config import FILE, ConfigReader, decoder_config, layer_windows
from troupellm.protocol.errors import ModelLoadError

ARCHITECTURES = ("GptOssForCausalLM",)
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    method = reader.section("quantization_config").values.get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ModelLoadError(f"{FILE}: quantization_config.quant_method of gpt-oss must be mxfp4, got {method!r}")
    reader = reader.without("quantization_config").with_defaults(rms_norm_eps=1e-5, rope_theta=150000.0, head_dim=64)
    if not reader.has("rope_parameters"):
        stretch = reader.values.get("rope_scaling") or YARN
        reader = reader.without("rope_parameters").with_defaults(rope_parameters=stretch)
    num_layers, bias = reader.integer("num_hidden_layers"), reader.flag("attention_bias", True)
    window = reader.integer("sliding_window", 128)
    windows = tuple(window if layer % 2 == 0 else None for layer in range(num_layers))
    if reader.is_on("layer_types"):
        windows = layer_windows(reader, window)
    config = decoder_config(reader, qkv_bias=bias, out_bias=bias, windows=windows)
    num_experts, top_k = expert_counts(reader, 128, 4)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("intermediate_size"),
        scoring="softmax_of_chosen",
        bias=True,
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
        names=ExpertNames(router="router", transposed=True, interleaved=True),
    )
    return config.with_layers(experts=moe, sinks=True)
