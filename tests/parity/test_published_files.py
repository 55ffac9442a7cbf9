"""The config.json files of published models, with smaller sizes: as they lie on the hub, often spelled otherwise than
`transformers` does it today. The same rotations and the same logits as it makes of the very same file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.layers.rope import rope_frequencies, rotation_of
from troupellm.models.load.architecture import served_part
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import IMAGES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt

LENGTH = 60
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    **SIZES, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
    "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 36, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **SIZES, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 16,
}  # fmt: skip
PHI: dict[str, Any] = {
    **SIZES,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "long_factor": [1.0 + 0.7 * i for i in range(8)],
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
    },
}
DEEPSEEK: dict[str, Any] = {
    **SIZES, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "num_hidden_layers": 3, "num_key_value_heads": 4, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "kv_lora_rank": 32, "max_position_embeddings": 163840, "moe_intermediate_size": 32,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 16, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_experts_per_tok": 6, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 20,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
THIRD: dict[str, Any] = {
    **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1, "n_group": 8,
    "n_routed_experts": 32, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "q_lora_rank": 40, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_group": 4, "topk_method": "noaux_tc",
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA,
    "Mistral-7B-v0.1": MISTRAL,
    "Mistral-7B-Instruct-v0.3": {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
    "Qwen3-8B": QWEN,
    "Qwen2-57B-A14B": {
        **{key: value for key, value in QWEN.items() if key not in ("attention_bias", "head_dim")},
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 28,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 80,
        "sliding_window": 65536,
    },
    "Qwen3-30B-A3B": {
        **QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "Mixtral-8x7B": {
        **MISTRAL,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "gemma-2-2b": GEMMA,
    "gemma-3-1b": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": None,
        "image_token_index": 262144,
        "initializer_range": 0.3,
        "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16",
        "vision_config": IMAGES,
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 112,
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 16,
            "vocab_size": 300,
            "head_dim": 32,
            "initializer_range": 0.3,
            "pad_token_id": 0,
        },
    },
    "Phi-3-mini-128k": PHI,
    "Phi-4-mini": {
        **PHI,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "rope_scaling": {
            "long_factor": [1.0 + 0.7 * i for i in range(6)],
            "type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
        },
    },
    "granite-3.3-8b": {
        **LLAMA,
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "OLMo-2-7B": {
        **LLAMA,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
    },
    "glm-4-9b-chat-hf": {
        **SIZES,
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "attention_bias": True,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B-0414": {
        **SIZES,
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "SmolLM3-3B": {
        **LLAMA,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "max_position_embeddings": 65536,
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gpt-oss-20b": {
        **SIZES,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 3,
        "head_dim": 32,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    "DeepSeek-V2-Lite": DEEPSEEK,
    "DeepSeek-V3": THIRD,
    "Moonlight-16B-A3B": {
        **{key: value for key, value in THIRD.items() if key != "rope_scaling"},
        "max_position_embeddings": 8192,
        "n_group": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "q_lora_rank": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_means_the_same(tmp_path: Path, name: str) -> None:
    file, text = tmp_path / "config.json", json.dumps(PUBLISHED[name])
    file.write_text(text)
    pair = Pair(tmp_path, transformers.AutoConfig.from_pretrained(tmp_path))
    file.write_text(text)  # which the reference's own spelling has taken the place of
    pair.open()
    for buffer, expected in pair.reference.named_buffers():
        kind = buffer.rpartition(".")[2]
        if kind.endswith("inv_freq") and "original" not in kind:
            layer = pair.config.windows.index(None) if kind.startswith("full_attention") else 0
            rotation = rotation_of(pair.config.layers[layer])
            assert rotation is not None
            found, _ = rope_frequencies(*rotation, LENGTH)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    prompt = make_prompt(LENGTH)
    torch.testing.assert_close(pair.own_logits(prompt), pair.logits(prompt)[-1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "is_causal must be true"),  # gte-Qwen2-7B-instruct, which reads in both directions
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling must say the same"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, "rope_scaling.alpha is not supported"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type must be one of"),
        (
            {"architectures": ["Ministral3ForCausalLM"], "rope_scaling": None},  # transformers would assume YaRN
            "rope_parameters must describe the rotation",
        ),
        (
            {"architectures": ["Mistral4ForCausalLM"], "scoring_func": "sigmoid"},
            'scoring_func must be one of softmax, got "sigmoid"',
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        describe_decoder(ConfigReader({**LLAMA, **changes}))


@pytest.mark.parametrize("name", ["gemma-3-1b", "gemma-3-4b"])
def test_gemmas_two_rotations_are_read_from_two_sections(name: str) -> None:
    """One section for both would leave open which of them is meant."""
    file = PUBLISHED[name]
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    nested = {**file["text_config"], **flat} if "text_config" in file else None
    changed = {**file, **flat} if nested is None else {**file, "text_config": nested}
    with pytest.raises(ModelLoadError, match="rope_parameters must have full_attention and sliding_attention"):
        describe_decoder(served_part(ConfigReader(changed))[0])
    newer = {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
    if nested is not None:
        changed = {**file, "text_config": {**nested, "rope_parameters": newer}}
        with pytest.raises(ModelLoadError, match="rope_scaling must say the same as rope_parameters"):
            describe_decoder(served_part(ConfigReader(changed))[0])


def test_bases_beside_gemmas_two_sections_count_where_these_name_none() -> None:
    """As the models' own code has it."""
    sections = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    file = {**PUBLISHED["gemma-3-1b"], "rope_parameters": sections, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    config = describe_decoder(ConfigReader(file))
    ropes = [config.layers[layer].rope for layer in (0, 5)]
    assert [rope and rope.theta for rope in ropes] == [2e4, 5e5]
