"""Small configurations of every decoder family, of `transformers`."""

from collections.abc import Callable

import torch
import transformers

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
"""Not tied as the real ones are: random embeddings that are scaled up make such a head repeat its input."""
GEMMA4 = {
    **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 20, "tie_word_embeddings": False,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
GEMMA4_SHARED = {
    **GEMMA4, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SIZES["vocab_size"], "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, *["sliding_attention"] * 2, "full_attention"],
}  # fmt: skip
"""Inputs of each layer; the last three layers read keys and values of the third and the fourth."""
LLAMA4 = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 48, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
    "no_rope_layers": [1, 1, 0, 1], "floor_scale": 9, "attn_scale": 0.3,
}  # fmt: skip
EXPERTS = {**SIZES, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
ROUTED = {
    **SIZES, "num_hidden_layers": 3, "head_dim": 32, "n_routed_experts": 16, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip
GROWING = {**YARN, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
           "llama_4_scaling_beta": 0.3}  # fmt: skip
"""Queries grow three times in a prompt of 50 tokens."""
LAYER_NORMS = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
HYBRID = {
    "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 112,
    "intermediate_size": 48, "embedding_multiplier": 7.0, "residual_multiplier": 0.4, "attention_multiplier": 0.05,
    "logits_scaling": 5.0, "mamba_n_heads": 4, "mamba_d_head": 32,
}  # fmt: skip
SINKS = {
    **SIZES, "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96,
    "head_dim": 32, "sliding_window": 20, "swiglu_alpha": 1.3, "swiglu_limit": 2.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
IMAGES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def longrope(rotary_dim: int, **more: float) -> dict[str, object]:
    """Phi's rotation, of three quarters of a head."""
    half = rotary_dim // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.2 * index for index in range(half)],
        "long_factor": [1.5 + 0.5 * index for index in range(half)],
        **more,
    }


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=24),
    "llama_biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama_linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama_one_kv_head": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral_window": lambda: transformers.MistralConfig(**SIZES, sliding_window=20, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2_tied_window": lambda: transformers.Qwen2Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **GEMMA, sliding_window=20, attn_logit_softcapping=3.0, final_logit_softcapping=4.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 3},
        sliding_window=20,
        sliding_window_pattern=3,
        rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "gemma3_with_images": lambda: transformers.Gemma3Config(
        text_config={**GEMMA, "sliding_window": 20},
        vision_config=IMAGES,
        initializer_range=0.3,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=20),
    "phi3_long": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=1, rope_parameters=longrope(12, attention_factor=1.3)
    ),
    "phi3_short": lambda: transformers.Phi3Config(
        **{**SIZES, "max_position_embeddings": 512},
        original_max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters=longrope(12),
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES, embedding_multiplier=7.0, residual_multiplier=0.4, attention_multiplier=0.05, logits_scaling=5.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo3": lambda: transformers.Olmo3Config(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=20,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "glm": lambda: transformers.GlmConfig(**SIZES, head_dim=32),
    "glm4": lambda: transformers.Glm4Config(**SIZES, head_dim=16, attention_bias=False),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "smollm3_window": lambda: transformers.SmolLM3Config(
        **SIZES, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=20
    ),
    "smollm3_listed_windows": lambda: transformers.SmolLM3Config(  # the flag has a say where there is no list
        **SIZES, no_rope_layers=[0, 1], sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **SIZES | {"num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], block_multiple_of=16
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **EXPERTS, **DELTA, head_dim=32, shared_expert_intermediate_size=48, decoder_sparse_step=2
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 3}, **DELTA, head_dim=32),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        num_dense_layers=1,
        routed_scaling_factor=1.3,
    ),
    "lfm2_biases": lambda: transformers.Lfm2Config(
        **SIZES | {"num_hidden_layers": 3},
        full_attn_idxs=[0, 2],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=8, sliding_window=20),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **EXPERTS, shared_expert_intermediate_size=80, mlp_only_layers=[1], use_sliding_window=True, sliding_window=20
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **EXPERTS, head_dim=32, norm_topk_prob=True, decoder_sparse_step=2, tie_word_embeddings=True
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SINKS),
    "deepseek_v2_lite": lambda: transformers.DeepseekV2Config(
        **LATENT,
        q_lora_rank=None,
        first_k_dense_replace=1,
        topk_method="greedy",
        routed_scaling_factor=1.3,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=40, topk_method="group_limited_greedy", n_group=4, topk_group=2, attention_bias=True
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=40,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        num_mtp_layers=0,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek_v3_halves": lambda: transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=None,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(
        **LATENT | {"n_routed_experts": 8},
        q_lora_rank=40,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        index_n_heads=2,
        index_head_dim=32,
    ),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **LATENT, q_lora_rank=40, first_k_dense_replace=1, index_n_heads=2, index_head_dim=32, index_topk_freq=2
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=SIZES["vocab_size"],
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=32,
        n_groups=2,
        state_size=24,
        conv_kernel=3,
        use_bias=True,
        initializer_range=0.3,
        tie_word_embeddings=True,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **SIZES,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        head_dim=32,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=24,
        time_step_min=0.3,
        rescale_prenorm_residual=False,
    ),
    "ministral3": lambda: transformers.Ministral3Config(**SIZES, head_dim=32, rope_parameters={**GROWING}),
    "mistral4": lambda: transformers.Mistral4Config(
        **{**LATENT, "n_shared_experts": 1},
        q_lora_rank=40,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.3,
        rope_parameters={**GROWING},
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **ROUTED, first_k_dense_replace=1, n_group=4, topk_group=2, use_qk_norm=True, routed_scaling_factor=1.3
    ),
    "glm4_moe_biases": lambda: transformers.Glm4MoeConfig(
        **ROUTED, first_k_dense_replace=2, attention_bias=True, norm_topk_prob=False, num_mtp_layers=0
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=3, rotary_dim=16
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **SIZES | {"num_hidden_layers": 3}, head_dim=32, sliding_window=20, sliding_window_pattern=3
    ),
    "exaone4_global": lambda: transformers.Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True
    ),
    "exaone_moe": lambda: transformers.ExaoneMoeConfig(
        **EXPERTS, sliding_window=20, sliding_window_pattern=3, num_shared_experts=2, n_group=4, topk_group=2
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**SIZES, head_dim=32, attention_out_bias=True, mlp_bias=True),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=32, tie_word_embeddings=False),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**SIZES, head_dim=32, use_bias=True, tie_word_embeddings=False),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=48,
        tie_word_embeddings=False,
    ),
    "dots1": lambda: transformers.Dots1Config(
        **ROUTED,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        sliding_window=20,
        max_window_layers=2,
        routed_scaling_factor=1.3,
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **{**SIZES, **HYBRID},
        position_embedding_type="rope",
    ),
    "granite4_hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **{**SIZES, **HYBRID, "num_hidden_layers": 3, "layer_types": DELTA["layer_types"]},
        mamba_n_groups=2,
        mamba_d_state=24,
        time_step_limit=(0.1, 1.5),
    ),
    "granite4_experts": lambda: transformers.GraniteMoeHybridConfig(
        **{**SIZES, **HYBRID, "num_hidden_layers": 3, "layer_types": DELTA["layer_types"], "num_local_experts": 8},
        num_experts_per_tok=3,
        mamba_d_state=24,
    ),
    "granite4_without_rotation": lambda: transformers.GraniteMoeHybridConfig(**{**SIZES, **HYBRID}),
    "cohere2": lambda: transformers.Cohere2Config(
        **SIZES | {"num_hidden_layers": 3},
        sliding_window=20,
        sliding_window_pattern=3,
        logit_scale=0.4,
        attention_bias=True,
    ),
    "falcon": lambda: transformers.FalconConfig(**LAYER_NORMS, bias=True),
    "falcon_newer": lambda: transformers.FalconConfig(**LAYER_NORMS, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_in_turn": lambda: transformers.FalconConfig(**LAYER_NORMS, parallel_attn=False, multi_query=False),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt_neox_in_turn": lambda: transformers.GPTNeoXConfig(
        **SIZES, hidden_act="gelu_fast", use_parallel_residual=False
    ),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "nemotron": lambda: transformers.NemotronConfig(**SIZES, head_dim=32),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, sliding_window=20),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **GEMMA4,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=20.0,
    ),
    "gemma4_experts": lambda: transformers.Gemma4TextConfig(
        **GEMMA4,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=48,
    ),
    "gemma4_shared": lambda: transformers.Gemma4TextConfig(**GEMMA4_SHARED),
    "mimo_v2": lambda: transformers.MiMoV2FlashConfig(
        **{**ROUTED, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 48, "n_shared_experts": 0},
        v_head_dim=32,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "llama4": lambda: transformers.Llama4TextConfig(**LLAMA4),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


VARIANTS = (
    "glm4_moe_biases", "exaone4_global", "granite4_without_rotation", "falcon_newer", "falcon_in_turn",
    "gpt_neox_in_turn", "starcoder2", "lfm2_biases", "gemma4", "mamba2", "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip
"""Families that another row stands for in a quick run."""
CLASSES = {"mistral4": "Mistral4ForCausalLM"}
"""Classes of model types that `AutoModelForCausalLM` does not know."""


def fresh_model(
    config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float32, kind: str = ""
) -> transformers.PreTrainedModel:
    """A model with random weights. kind: name of its class, where it is not the usual one of its type."""
    kind = kind or CLASSES.get(config.model_type, "")
    make = getattr(transformers, kind)._from_config if kind else transformers.AutoModelForCausalLM.from_config
    return make(config, dtype=dtype)
