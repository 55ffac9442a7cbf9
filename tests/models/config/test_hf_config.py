"""config.json becomes one frozen description, or one line that names the key at fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.load.architecture import describe_model
from troupellm.protocol.errors import ModelLoadError

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


def describe(folder: Path, **changes: Any) -> DecoderConfig:
    values = {key: value for key, value in {**PLAIN, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return describe_model(folder)


def test_defaults_of_a_small_file(tmp_path: Path) -> None:
    config = describe(tmp_path)
    assert (config.layers[0].num_kv_heads, config.layers[0].head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.windows == (None, None, None)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("default", 10000.0)
    assert not config.tie_word_embeddings
    assert config.qk_norm == "none"
    assert config.checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": ...}, "config.json: vocab_size is missing"),
        ({"vocab_size": "300"}, 'config.json: vocab_size must be an integer of at least 1, got "300"'),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers must be an integer of at least 1, got 0"),
        (
            {"num_hidden_layers": 10_001},
            "config.json: num_hidden_layers must be an integer of at most 10000, got 10001",
        ),
        ({"vocab_size": 2**31}, "config.json: vocab_size must be an integer of at most 2147483647, got 2147483648"),
        ({"num_hidden_layers": True}, "config.json: num_hidden_layers must be an integer of at least 1, got true"),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads must divide num_attention_heads (4), got 3"),
        ({"hidden_size": 66}, "config.json: hidden_size must be a multiple of num_attention_heads (4), got 66"),
        ({"head_dim": 15}, "config.json: head_dim must be even, got 15"),
        ({"hidden_act": "gelu"}, 'config.json: hidden_act must be one of silu, swish, got "gelu"'),
        ({"rms_norm_eps": -1}, "config.json: rms_norm_eps must be a number above 0, got -1"),
        ({"rms_norm_eps": 10**400}, f"config.json: rms_norm_eps must be a number above 0, got {10**79}"),
        (
            {"architectures": ["Phi3ForCausalLM"], "layer_types": [[], [], []]},
            "config.json: layer_types may hold full_attention and sliding_attention, got [[], [], []]",
        ),
        ({"tie_word_embeddings": 1}, "config.json: tie_word_embeddings must be true or false, got 1"),
        ({"rope_scaling": [1]}, "config.json: rope_scaling must be an object, got [1]"),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1e307}},
            "config.json: rope_scaling.factor must stretch 128 positions to at most 2147483647, got 1e+307",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}},
            "config.json: rope_scaling.llama_4_scaling_beta is not supported, got 0.1",
        ),
        (
            {"rope_scaling": {"type": "default", "interleaved": True}},
            "config.json: rope_scaling.interleaved is not supported, got true",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}},
            "config.json: rope_scaling.extrapolation_factor must be 1.0, got 0.5",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"type": "yarn"}},
            'config.json: rope_scaling must say the same as rope_parameters, or be removed, got {"type": "yarn"}',
        ),
        (
            {"is_causal": False},
            "config.json: is_causal must be true: attention that looks ahead is not supported, got false",
        ),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor must be 1.0, got 0.5"),
        ({"torch_dtype": "int8"}, 'config.json: torch_dtype must be one of float32, bfloat16, float16, got "int8"'),
        ({"architectures": []}, "config.json: architectures must name one architecture, got []"),
        ({"architectures": ["Gpt2LMHeadModel"]}, "config.json: architecture Gpt2LMHeadModel is not supported"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        describe(tmp_path, **changes)
    assert caught.value.message == message


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"^config\.json"):
        describe_model(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^config\.json is missing"):
        describe_model(tmp_path)


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = describe(tmp_path, rope_theta=500.0, rope_scaling={"type": "yarn", **yarn})
    new = describe(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **yarn})
    both = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **yarn}}
    assert describe(tmp_path, **both, rope_scaling={"type": "yarn", **yarn}) == old == new
    (rope,) = new.ropes
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("yarn", 500.0, 4.0, 32)


def test_what_the_first_phi3_files_call_yarn_is_longrope(tmp_path: Path) -> None:
    phi = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    kinds = [describe(tmp_path, **phi, rope_scaling={"type": kind, **factors}) for kind in ("longrope", "su", "yarn")]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[2].ropes[0].long_factor == (2.0,) * 8


@pytest.mark.parametrize("number", [10**400, float("inf"), float("nan"), True], ids=["huge", "inf", "nan", "true"])
def test_factors_that_no_rotation_can_be_made_of_are_refused(tmp_path: Path, number: float) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [number]}
    with pytest.raises(ModelLoadError, match=r"^config\.json: rope_scaling\.long_factor must hold numbers above 0"):
        describe(tmp_path, original_max_position_embeddings=32, rope_scaling={"type": "longrope", **factors})


def test_sections_for_images_do_not_turn_text(tmp_path: Path) -> None:
    sections = {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_type": "default"}
    assert describe(tmp_path, rope_scaling=sections) == describe(tmp_path)
    omni = {**sections, "interleaved": True, "type": "default"}
    assert describe(tmp_path, rope_scaling=omni) == describe(tmp_path), "as Qwen3-Omni's files say it"


def test_a_model_that_attends_by_chunks_is_served_as_far_as_the_first(tmp_path: Path) -> None:
    """Qwen2.5-7B-Instruct-1M, and others of a million tokens: one chunk is what it is without chunks."""
    chunks = {"chunk_size": 96, "local_size": 16, "original_max_position_embeddings": 96}
    assert describe(tmp_path, dual_chunk_attention_config=chunks).max_position_embeddings == 80
    assert describe(tmp_path, dual_chunk_attention_config=None).max_position_embeddings == 128
    longer = {"chunk_size": 512, "local_size": 64}
    assert describe(tmp_path, dual_chunk_attention_config=longer).max_position_embeddings == 128
    with pytest.raises(ModelLoadError, match="dual_chunk_attention_config.local_size must be below chunk_size"):
        describe(tmp_path, dual_chunk_attention_config={"chunk_size": 16, "local_size": 16})


def test_windows_of_the_families(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert describe(tmp_path, **mistral, sliding_window=9).windows == (9, 9, 9)
    assert describe(tmp_path, **mistral).windows == (4096, 4096, 4096), "as the models' own code"
    assert describe(tmp_path, **mistral, sliding_window=None).windows == (None, None, None)
    qwen = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "max_window_layers": 1}
    assert describe(tmp_path, **qwen).windows == (None, None, None)
    assert describe(tmp_path, **qwen, use_sliding_window=True).windows == (None, 9, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert describe(tmp_path, **qwen, use_sliding_window=True, layer_types=kinds).windows == (9, None, 9)
    with pytest.raises(ModelLoadError, match="layer_types may hold full_attention and sliding_attention"):
        describe(tmp_path, **qwen, use_sliding_window=True, layer_types=["x"] * 3)


def test_biases_and_norms_of_the_families(tmp_path: Path) -> None:
    biased = describe(tmp_path, attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias, biased.qk_norm) == (True, True, True, "none")
    qwen2 = describe(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, "none")
    qwen3 = describe(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, "head")


def test_values_that_files_with_experts_leave_out(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    glm = describe(tmp_path, architectures=["Glm4MoeForCausalLM"], num_attention_heads=16, **experts)
    assert glm.layers[0].num_kv_heads == 8, "as the models' own code"
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    mistral = {"architectures": ["Mistral4ForCausalLM"], "rope_parameters": rope, **experts}
    assert describe(tmp_path, **mistral, scoring_func="softmax") == describe(tmp_path, **mistral)
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4}
    kinds = ("qwen3_vl_moe_text", "qwen3_moe")
    found = [describe(tmp_path, **qwen, model_type=kind).experts for kind in kinds]
    assert [moe and moe.renormalize for moe in found] == [True, False]


def test_k_exaone_under_its_publishers_name(tmp_path: Path) -> None:
    found = [
        describe(tmp_path, architectures=[name], sliding_window=9, moe_intermediate_size=48)
        for name in ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
    ]
    assert found[0] == found[1]
    assert found[0].architecture == "ExaoneMoeForCausalLM"
