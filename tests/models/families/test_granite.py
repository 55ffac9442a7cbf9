"""config.json of Granite 4: state-space layers, experts, and values that are refused."""

import math
from typing import Any

import pytest

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.granite import describe
from troupellm.models.memory.weight_count import weight_count
from troupellm.protocol.errors import ModelLoadError

TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12, "hidden_size": 1536, "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 6, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
    "num_local_experts": 64, "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
    "rope_theta": 10000, "shared_intermediate_size": 1024, "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip
"""The sizes of granite-4.0-h-tiny."""


def described(**changes: Any) -> Any:
    return describe(ConfigReader({**TINY, **changes}))


def test_the_sizes_of_h_tiny() -> None:
    config = described()
    mixers = [shape.mixer for shape in config.layers]
    assert [layer for layer, mixer in enumerate(mixers) if mixer == "attention"] == [5, 15, 25, 35]
    assert all(shape.rope is None for shape in config.layers)
    assert (config.ssd.heads, config.ssd.head_size, config.ssd.state_size) == (48, 64, 128)
    assert config.ssd.most_step == math.inf
    assert 6.5e9 < weight_count(config) < 7.5e9
    assert 1.4e9 < weight_count(config, active=True) < 1.5e9


def test_limits_of_steps_are_read_as_transformers_writes_them() -> None:
    config = described(time_step_limit=[0.5, {"__float__": "Infinity"}])
    assert (config.ssd.least_step, config.ssd.most_step) == (0.5, math.inf)


def test_layers_that_all_attend_have_no_states() -> None:
    config = described(layer_types=["attention"] * 40, num_local_experts=0)
    assert config.ssd is None
    assert config.experts is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["mamba"] * 40}, "layer_types .*at least once"),
        ({"layer_types": ["mamba"]}, "layer_types .*list of 40 names"),
        ({"mamba_n_heads": 47}, "mamba_n_heads .*must divide 3072"),
        ({"mamba_d_head": 32}, "mamba_d_head .*must be 64"),
        ({"mamba_n_groups": 5}, "mamba_n_groups .*must divide mamba_n_heads"),
        ({"mamba_d_conv": 1}, "mamba_d_conv .*at least 2"),
        ({"time_step_limit": [1]}, "time_step_limit .*two numbers"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type .*one of rope"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok .*at most num_local_experts"),
    ],
)
def test_values_that_are_not_served_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        described(**changes)
