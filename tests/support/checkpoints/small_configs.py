"""Configurations of `transformers` made small, of all kinds: the common names of a size are set to small values."""

from typing import Any

import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3, "sliding_window": 20, "tie_word_embeddings": False,
    # experts
    "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "shared_expert_intermediate_size": 48, "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    # encoders and decoders in one
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 64,
    # images
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def small(kind: type[transformers.PreTrainedConfig], changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    """A configuration of that kind, and those within it.

    Args:
        changes: what this kind needs otherwise; None is to leave its own, and a dict is of a configuration within.
    """
    plain = kind(**{name: value for name, value in changes.items() if isinstance(value, dict)})
    known = {*plain.to_dict(), *kind.attribute_map, *changes}
    own = {name: value for name, value in (SMALL | changes).items() if name in known and value is not None}
    inner = {name: getattr(plain, name, None) for name in kind.sub_configs}
    within = {name: small(type(config), changes.get(name, {})) for name, config in inner.items() if config is not None}
    return kind(**own | within)
