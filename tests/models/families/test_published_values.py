"""Values of published config.json files that a reader of the reference's defaults alone would refuse or misread."""

from typing import Any

import pytest

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.load.states import check_states
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError

LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "rope_theta": 500000.0,
    "max_position_embeddings": 16384, "attention_chunk_size": 8192, "rms_norm_eps": 1e-5, "no_rope_layers": [],
    "attn_scale": 0.1, "floor_scale": 8192,
}  # fmt: skip
MIMO: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "swa_num_key_value_heads": 2,
    "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "max_position_embeddings": 1024,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "sliding_window": 16,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 1024, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "block_ff_dim": 96, "conv_L_cache": 3, "full_attn_idxs": [1],
    "norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 1024,
}  # fmt: skip


def described(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return describe_decoder(ConfigReader(values | changes))


@pytest.mark.parametrize(("value", "grows"), [(4, True), (True, True), (0, False), (False, False)])
def test_a_number_turns_the_growth_of_queries_on_as_true_does(value: Any, grows: bool) -> None:
    assert (described(LLAMA4, attn_temperature_tuning=value).query_growth is not None) == grows
    assert described(LLAMA4).query_growth is not None


def test_values_have_the_reference_s_factor_unless_a_null_says_none() -> None:
    assert described(MIMO).value_scale == 0.707
    assert described(MIMO, attention_value_scale=0.5).value_scale == 0.5
    assert described(MIMO, attention_value_scale=None).value_scale == 1.0


def test_experts_have_the_activation_of_the_dense_part() -> None:
    for name, activation in (("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")):
        model = described(GEMMA4, hidden_activation=name)
        assert {model.activation, *(shape.experts.activation for shape in model.layers)} == {activation}


def test_block_sizes_that_fit_no_snapshot_are_refused_for_models_with_states_alone() -> None:
    config = EngineConfig.from_flat({"model": "m", "block_size": 24})
    config.check()
    check_states(described(GEMMA4), config, on_gpu=False)
    with pytest.raises(ConfigError, match="set it to 2040"):
        check_states(described(LFM2), config, on_gpu=False)
    fitting = EngineConfig.from_flat({"model": "m", "block_size": 24, "state_snapshot_interval": 2040})
    check_states(described(LFM2), fitting, on_gpu=False)
