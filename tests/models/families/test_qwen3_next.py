"""config.json of Qwen3-Next and Qwen3.5: published sizes, which layers attend, and values that are refused."""

from typing import Any

import pytest
import torch

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.qwen3_next import describe
from troupellm.models.layers.states import state_bytes
from troupellm.models.memory.weight_count import weight_count
from troupellm.protocol.errors import ModelLoadError

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
"""Qwen3-Next-80B-A3B."""


def described(**changes: Any) -> Any:
    return describe(ConfigReader({**PUBLISHED, **changes}))


def test_the_published_file_of_80b() -> None:
    config = described()
    mixers = [shape.mixer for shape in config.layers]
    assert mixers == (["gated_delta"] * 3 + ["attention"]) * 12
    assert config.layers[3].rotary_dim == 64
    assert config.layers[0].experts.shared_gate
    assert 79e9 < weight_count(config) < 81e9
    assert 3e9 < weight_count(config, active=True) < 4.1e9
    recurrent, conv = 32 * 128 * 128 * 4, 3 * 8192 * 2
    assert state_bytes(config, torch.bfloat16) == 36 * (recurrent + conv)


def test_a_dense_model_has_four_projections_of_the_input() -> None:
    dense = {key: value for key, value in PUBLISHED.items() if "expert" not in key}
    config = describe(ConfigReader(dense | {"architectures": ["Qwen3_5ForCausalLM"]}))
    assert not config.gated_delta.grouped
    assert config.experts is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "attention_bias .*must be false"),
        ({"attn_output_gate": False}, "attn_output_gate .*must be true"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads .*multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim .*at least 2"),
        ({"layer_types": ["conv"] * 48}, "layer_types .*full_attention or linear_attention"),
        ({"full_attention_interval": 50}, "layer_types .*at least once"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok .*at most num_experts"),
    ],
)
def test_values_that_are_not_served_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        described(**changes)
