"""The tiny models that test GGUF architectures: a configuration of transformers and the converter of its family."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import gguf
import torch
import transformers

from troupellm.tests.support.gguf.gguf_converter import (
    Arch,
    Converter,
    base_keys,
    deepseek_tensors,
    fused_experts,
    gpt_oss_tensors,
    older_experts,
    split_experts,
)

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], "long_factor": [4.0, 3.0, 2.0, 1.0, 5.0, 6.0, 7.0, 8.0],
}  # fmt: skip
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.05, "residual_multiplier": 0.4, "logits_scaling": 4.0}
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
Writer, Config = gguf.GGUFWriter, dict[str, Any]


class Family(NamedTuple):
    """A model, made anew for each use because its vocabulary is filled in."""

    converter: Converter
    make: Callable[[], transformers.PretrainedConfig]
    extra: Callable[[Writer], None] = lambda writer: None


def llama_keys(writer: Writer, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def sparse_keys(writer: Writer, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def gemma_keys(writer: Writer, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_file_type(0)


def gemma2_keys(writer: Writer, config: Config) -> None:
    gemma_keys(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def lfm2_keys(writer: Writer, config: Config) -> None:
    """As `LFM2Model.set_gguf_parameters`: layers with a convolution have no heads of keys."""
    heads = config["num_key_value_heads"]
    counts = [heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
    base_keys(writer, config | {"num_key_value_heads": counts})
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])


def window_key(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])


def pattern_keys(writer: Writer, config: Config) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def phi3_keys(writer: Writer, config: Config) -> None:
    rope, head_dim = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    rotary = int(rope.get("partial_rotary_factor", 1.0) * head_dim)
    original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(0)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("long", "short"):
            factors = torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors.numpy())


def granite_keys(writer: Writer, config: Config) -> None:
    llama_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def granite4_keys(writer: Writer, config: Config) -> None:
    """As `GraniteHybridModel.set_gguf_parameters` writes them for models without recurrent layers."""
    granite_keys(writer, config)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(256)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(2 * config["hidden_size"])
    writer.add_ssm_time_step_rank(128)
    writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])
    writer.add_rope_scaling_finetuned(True)


def glm4_keys(writer: Writer, config: Config) -> None:
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def gpt_oss_keys(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def latent_keys(writer: Writer, config: Config) -> None:
    """As `DeepseekV2Model.set_gguf_parameters` writes them beside those of every model."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    deepseek_keys(writer, config)


def older_latent_keys(writer: Writer, config: Config) -> None:
    """As files of before April 2025 have them, whose `attn_kv_b` is not split."""
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    deepseek_keys(writer, config)


def deepseek_keys(writer: Writer, config: Config) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    mscale = config["rope_parameters"].get("mscale_all_dim")
    if mscale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def scale_keys(writer: Writer, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2_keys(writer: Writer, config: Config) -> None:
    scale_keys(writer, config)
    window_key(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def hunyuan_keys(writer: Writer, config: Config) -> None:
    """The base is written with its scaling."""
    rope, size = config["rope_parameters"], config["head_dim"]
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])


def minimax_keys(writer: Writer, config: Config) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def minimax_tensors(name: str, tensor: torch.Tensor, config: Config) -> Any:
    if name.endswith("mlp.e_score_correction_bias"):
        return [(name.replace("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction.bias"), tensor)]
    return split_experts(name, tensor, config)


def merged_deepseek(name: str, tensor: torch.Tensor, config: Config) -> Any:
    return [(name, tensor)] if "kv_b_proj" in name else deepseek_tensors(name, tensor, config)


LLAMA = Converter(Arch.LLAMA, llama_keys, turned=True)
MIXTRAL = replace(LLAMA, tensors=split_experts)
GRANITE = Converter(Arch.GRANITE, granite_keys, turned=True)
GEMMA = Converter(Arch.GEMMA, gemma_keys, plain=True, norm_shift=1.0)
GEMMA2 = Converter(Arch.GEMMA2, gemma2_keys, plain=True, norm_shift=1.0)
GEMMA3 = Converter(Arch.GEMMA3, window_key, norm_shift=1.0)
PHI3 = Converter(Arch.PHI3, phi3_keys, plain=True)
OLMO2 = Converter(Arch.OLMO2, pattern_keys)
SPARSE2 = Converter(Arch.QWEN2MOE, sparse_keys, split_experts)
GPT_OSS = Converter(Arch.GPT_OSS, gpt_oss_keys, gpt_oss_tensors)
DEEPSEEK = Converter(Arch.DEEPSEEK2, latent_keys, deepseek_tensors)
OLDER_DEEPSEEK = replace(DEEPSEEK, keys=older_latent_keys, tensors=merged_deepseek)


def family(converter: Converter, config: str, **changes: Any) -> Family:
    return Family(converter, lambda: getattr(transformers, f"{config}Config")(**SIZES | changes))


FAMILIES = {
    "llama": family(LLAMA, "Llama"),
    "llama with biases": family(LLAMA, "Llama", attention_bias=True, mlp_bias=True, head_dim=32),
    "mistral": family(
        replace(LLAMA, keys=lambda w, c: (llama_keys(w, c), window_key(w, c))), "Mistral", sliding_window=5
    ),
    "mixtral": family(MIXTRAL, "Mixtral", num_local_experts=4, sliding_window=None),
    "mixtral, a tensor per expert": family(
        replace(LLAMA, tensors=older_experts), "Mixtral", num_local_experts=4, sliding_window=None
    ),
    "qwen2": family(Converter(Arch.QWEN2), "Qwen2", tie_word_embeddings=True),
    "qwen2 with yarn": family(Converter(Arch.QWEN2), "Qwen2", rope_parameters=YARN),
    "qwen3": family(Converter(Arch.QWEN3), "Qwen3", head_dim=32),
    "qwen2moe": family(SPARSE2, "Qwen2Moe", shared_expert_intermediate_size=64, **EXPERTS),
    "qwen2moe, gate and up fused": family(
        replace(SPARSE2, tensors=fused_experts), "Qwen2Moe", shared_expert_intermediate_size=64, **EXPERTS
    ),
    "qwen3moe": family(
        Converter(Arch.QWEN3MOE, sparse_keys, split_experts), "Qwen3Moe", head_dim=32, norm_topk_prob=True, **EXPERTS
    ),
    "gemma2": family(GEMMA2, "Gemma2", num_hidden_layers=3, head_dim=32, query_pre_attn_scalar=32, sliding_window=6),
    "gemma2 of 46 layers": family(
        GEMMA2, "Gemma2", num_hidden_layers=46, head_dim=32, query_pre_attn_scalar=16, sliding_window=6
    ),
    "gemma3": family(
        GEMMA3,
        "Gemma3Text",
        num_hidden_layers=7,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma3 of 62 layers": family(
        GEMMA3, "Gemma3Text", num_hidden_layers=62, head_dim=32, query_pre_attn_scalar=16, sliding_window=6
    ),
    "phi3": family(PHI3, "Phi3", sliding_window=6),
    "phi3 without a window": family(PHI3, "Phi3", sliding_window=None),
    "phi3 with longrope": family(
        PHI3, "Phi3", rope_parameters=LONGROPE, sliding_window=None, original_max_position_embeddings=16
    ),
    "phi3 that rotates a part": family(
        PHI3,
        "Phi3",
        num_attention_heads=2,
        sliding_window=None,
        original_max_position_embeddings=16,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5},
    ),
    "granite": family(GRANITE, "Granite", **SCALES),
    "granite 4 without recurrent layers": family(replace(GRANITE, keys=granite4_keys), "Granite", **SCALES),
    "smollm3": family(Converter(Arch.SMOLLM3, llama_keys, turned=True), "SmolLM3", num_hidden_layers=5),
    "olmo2": family(OLMO2, "Olmo2"),
    "olmo3": family(
        OLMO2,
        "Olmo3",
        num_hidden_layers=5,
        sliding_window=6,
        rope_parameters={
            "full_attention": {**YARN, "attention_factor": 0.1 * math.log(4.0) + 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4": family(Converter(Arch.GLM4, glm4_keys), "Glm4", head_dim=32, attention_bias=True),
    "gpt-oss": family(
        GPT_OSS,
        "GptOss",
        num_hidden_layers=3,
        head_dim=32,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
            "rope_theta": 150000.0,
        },
    ),
    "deepseek2": family(
        DEEPSEEK, "DeepseekV2", topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, **MLA
    ),
    "deepseek2 of before": family(
        OLDER_DEEPSEEK,
        "DeepseekV2",
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=1,
        routed_scaling_factor=16.0,
        **MLA | {"q_lora_rank": None},
    ),
    "deepseek2 with sigmoids": family(
        DEEPSEEK,
        "DeepseekV3",
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        **MLA,
    ),
    "gemma": family(GEMMA, "Gemma", head_dim=32),
    "command-r": family(Converter(Arch.COMMAND_R, scale_keys), "Cohere", logit_scale=0.3),
    "command-r with normed heads": family(
        Converter(Arch.COMMAND_R, scale_keys), "Cohere", logit_scale=0.3, use_qk_norm=True
    ),
    "cohere2": family(Converter(Arch.COHERE2, cohere2_keys), "Cohere2", num_hidden_layers=5, sliding_window=6),
    "exaone4": family(Converter(Arch.EXAONE4, pattern_keys), "Exaone4", num_hidden_layers=5, sliding_window=6),
    "exaone4 without windows": family(
        Converter(Arch.EXAONE4, pattern_keys), "Exaone4", sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "lfm2": family(
        Converter(Arch.LFM2, lfm2_keys, plain=True),
        "Lfm2",
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "ernie4_5": family(Converter(Arch.ERNIE4_5), "Ernie4_5", head_dim=32),
    "hunyuan-dense": family(
        Converter(Arch.HUNYUAN_DENSE, hunyuan_keys),
        "HunYuanDenseV1",
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "seed_oss": family(Converter(Arch.SEED_OSS), "SeedOss", head_dim=32, attention_bias=True, attention_out_bias=False),
    "minimax-m2": family(
        Converter(Arch.MINIMAXM2, minimax_keys, minimax_tensors),
        "MiniMaxM2",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}
"""By the row of the table of architectures that they are of."""
SHORT = family(
    PHI3,
    "Phi3",
    sliding_window=None,
    original_max_position_embeddings=64,
    rope_parameters={**LONGROPE, "original_max_position_embeddings": 64},
)
"""Phi-3 whose trained context the tests' sequences do not outgrow."""
