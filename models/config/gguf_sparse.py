"""Settings from the files of models with experts, in the form of config.json. Sources are those of dense.py."""

from typing import Any

from troupellm.models.config.gguf_dense import Config, common, decoder, layer_kinds
from troupellm.models.config.gguf_metadata import Metadata
from troupellm.models.config.gguf_rope import rope_parameters

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`; 0 is unset."""


def qwen2moe(file: Metadata) -> Config:
    """No key says that the weights of the chosen experts stay as they are."""
    return (
        decoder(file, "Qwen2MoeForCausalLM", "qwen2_moe")
        | _experts(file)
        | {
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": file.reader.integer("expert_shared_feed_forward_length"),
        }
    )


def qwen3moe(file: Metadata) -> Config:
    """No key says that the weights of the chosen experts are divided by their sum."""
    return decoder(file, "Qwen3MoeForCausalLM", "qwen3_moe") | _experts(file) | {"norm_topk_prob": True}


def _experts(file: Metadata) -> Config:
    reader = file.reader
    return {
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
    }


def gpt_oss(file: Metadata) -> Config:
    """Windows in even layers; YaRN's range is not rounded."""
    reader, found = file.reader, decoder(file, "GptOssForCausalLM", "gpt_oss")
    rope = found["rope_parameters"]
    if rope.get("rope_type") == "yarn":
        rope = rope | {"truncate": False}
    return (
        found
        | layer_kinds(file, found["num_hidden_layers"], 2)
        | {
            "rope_parameters": rope,
            "intermediate_size": reader.integer("expert_feed_forward_length"),
            "num_local_experts": reader.integer("expert_count"),
            "num_experts_per_tok": reader.integer("expert_used_count"),
        }
    )


def deepseek2(file: Metadata) -> Config:
    """DeepSeek V2, and V3 where experts are scored by sigmoids.

    Newer files split what makes keys and values from the latent vector, and give the sizes of a head in keys that end
    in `_mla`; `attention.key_length` is then that of the cached vector.
    """
    reader = file.reader
    third = reader.integer("expert_gating_func", SOFTMAX) == SIGMOID
    found = common(file, f"Deepseek{'V3' if third else 'V2'}ForCausalLM", f"deepseek_v{'3' if third else '2'}")
    rotated, latent = reader.integer("rope.dimension_count"), reader.integer("attention.kv_lora_rank")
    split = reader.has("attention.key_length_mla")
    key = reader.integer("attention.key_length_mla" if split else "attention.key_length")
    if split:
        for name, size in (("key_length", latent + rotated), ("value_length", latent), ("head_count_kv", 1)):
            if reader.integer(f"attention.{name}", size) != size:
                raise reader.refuse(f"attention.{name}", f"must be {size}")
    if key <= rotated:
        raise reader.refuse("rope.dimension_count", f"must be below the size of a key ({key})")
    heads = reader.integer("attention.head_count")
    if not split and reader.integer("attention.head_count_kv", heads) != heads:
        raise reader.refuse("attention.head_count_kv", f"must be {heads}")
    return (
        found
        | _latent_rope(file, rotated)
        | _routing(file, third=third)
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
            "kv_lora_rank": latent,
            "q_lora_rank": reader.integer("attention.q_lora_rank") if reader.has("attention.q_lora_rank") else None,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated,
            "v_head_dim": reader.integer("attention.value_length_mla" if split else "attention.value_length"),
            "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
            "first_k_dense_replace": reader.integer("leading_dense_block_count", 0, least=0),
        }
    )


def _latent_rope(file: Metadata, rotated: int) -> Config:
    """`yarn_log_multiplier` is a tenth of `mscale_all_dim`; no published model has another `mscale`."""
    rope: dict[str, Any] = rope_parameters(file, rotated)
    multiplier = file.reader.optional("rope.scaling.yarn_log_multiplier")
    if multiplier is not None:
        rope |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return {"rope_parameters": rope}


def _routing(file: Metadata, *, third: bool) -> Config:
    reader = file.reader
    if not third and reader.integer("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise reader.refuse("expert_gating_func", f"must be {SOFTMAX} (softmax) or {SIGMOID} (sigmoid)")
    groups = reader.integer("expert_group_count", 1)
    return {
        "n_routed_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "n_shared_experts": reader.integer("expert_shared_count"),
        "routed_scaling_factor": reader.number("expert_weights_scale", 1.0),
        "norm_topk_prob": reader.flag("expert_weights_norm", False),
        "topk_method": "noaux_tc" if third else ("greedy" if groups == 1 else "group_limited_greedy"),
        "n_group": groups,
        "topk_group": reader.integer("expert_group_used_count", 1),
    }


def minimax_m2(file: Metadata) -> Config:
    """Raises ModelLoadError for experts that are not scored by sigmoids."""
    reader = file.reader
    if reader.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise reader.refuse("expert_gating_func", f"must be {SIGMOID} (sigmoid)")
    return decoder(file, "MiniMaxM2ForCausalLM", "minimax_m2", partial=True) | {
        "intermediate_size": reader.integer("expert_feed_forward_length"),
        "num_local_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
    }
