"""The public models' shapes as folders with a configuration alone; their weights are made up on the device."""

import json
from pathlib import Path
from typing import Any

from troupellm.load_tests.random_model import write_tokenizer
from troupellm.load_tests.roofline import SIZES


def config_of(name: str) -> dict[str, Any]:
    """Of one of `SIZES`."""
    size = SIZES[name]
    mixed, family = size.experts > 0, name.partition("-")[0]
    config: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}{'Moe' if mixed else ''}ForCausalLM"],
        "model_type": f"{family}_moe" if mixed else family,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": name == "qwen3-0.6b",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if mixed:
        config |= {
            "num_experts": size.experts,
            "num_experts_per_tok": size.active_experts,
            "moe_intermediate_size": size.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def write_model(name: str, folder: Path) -> Path:
    """Configuration and a tokenizer of made-up words."""
    place = folder / name
    if not place.exists():
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")
        write_tokenizer(place, SIZES[name].vocab)
    return place
