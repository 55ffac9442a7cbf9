"""config.json of LFM2: published files, both spellings of its layers, and values that are refused."""

from typing import Any

import pytest

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.lfm2 import describe
from troupellm.models.memory.weight_count import weight_count
from troupellm.protocol.errors import ModelLoadError

PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
"""LFM2-350M."""


def described(**changes: Any) -> Any:
    return describe(ConfigReader({**PUBLISHED, **changes}))


def test_the_published_file_of_350m() -> None:
    config = described()
    mixers = [shape.mixer for shape in config.layers]
    assert [layer for layer, mixer in enumerate(mixers) if mixer == "attention"] == [2, 5, 8, 10, 12, 14]
    assert mixers.count("short_conv") == 10
    assert config.layers[0].intermediate_size == 4608
    assert (config.short_conv.taps, config.short_conv.bias) == (3, False)
    assert config.tie_word_embeddings
    assert config.layers[2].rope.theta == 1e6
    assert weight_count(config) == 354_483_968


SPARSE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24,
    "layer_types": (["conv"] * 2 + ["full_attention"] + ["conv"] * 3 + ["full_attention"]) * 3 + ["conv"] * 3,
    "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "routed_scaling_factor": 1.0, "use_expert_bias": True, "vocab_size": 65536,
}  # fmt: skip
"""The sizes of LFM2-8B-A1B."""


def test_a_model_with_experts_has_some_dense_layers_first() -> None:
    config = describe(ConfigReader(SPARSE))
    assert [shape.experts is None for shape in config.layers[:3]] == [True, True, False]
    assert config.layers[0].intermediate_size == 7168
    assert config.experts.choice_bias
    assert 8.3e9 < weight_count(config) < 8.4e9
    assert 1.4e9 < weight_count(config, active=True) < 1.6e9
    with pytest.raises(ModelLoadError, match="num_experts_per_tok .*at most num_experts"):
        describe(ConfigReader(SPARSE | {"num_experts_per_tok": 33}))


def test_layers_may_be_named_one_by_one() -> None:
    kinds = ["conv", "full_attention"] * 8
    config = described(layer_types=kinds, full_attn_idxs=None)
    assert [shape.mixer for shape in config.layers] == ["short_conv", "attention"] * 8


def test_the_width_is_adjusted_or_not() -> None:
    assert described(block_auto_adjust_ff_dim=False).layers[0].intermediate_size == 6656
    assert described(block_ffn_dim_multiplier=None).layers[0].intermediate_size == 4437
    assert described(block_ffn_dim_multiplier=0.5).layers[0].intermediate_size == 2304
    newer = {key: value for key, value in PUBLISHED.items() if key != "block_ff_dim"} | {"intermediate_size": 6656}
    assert describe(ConfigReader(newer)).layers[0].intermediate_size == 4608


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv_dim": 512}, "conv_dim .*must be hidden_size"),
        ({"conv_L_cache": 1}, "conv_L_cache .*at least 2"),
        ({"conv_L_cache": 17}, "conv_L_cache .*at most 16"),
        ({"use_pos_enc": False}, "use_pos_enc .*must be true"),
        ({"full_attn_idxs": [16]}, "full_attn_idxs .*below num_hidden_layers"),
        ({"full_attn_idxs": []}, "layer_types .*at least once"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types .*list of 16 names"),
        ({"layer_types": ["conv", "linear_attention"] * 8}, "layer_types .*full_attention or conv"),
    ],
)
def test_values_that_are_not_served_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        described(**changes)
