"""Each feature of a family beyond Llama matters in the small checkpoints: without any one of it, the logits are others.

Otherwise a family whose description forgets something could equal `transformers` all the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from troupellm.models.config.decoder_config import DecoderConfig, LayerNormBlock, LayerNorms, QueryGrowth, RopeConfig
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt

LENGTH = 45
CLEAR = 0.01
"""A hundred times what parity forgives."""
ROTATION, NEARBY = RopeConfig(theta=10000.0), RopeConfig(theta=100.0)
TRUNCATED = RopeConfig(kind="yarn", theta=10000.0, factor=8.0, original_max_position=32)
STRETCHED = RopeConfig(kind="linear", theta=5000.0, factor=2.5)
Changes = dict[str, Any]


def all_turned(config: DecoderConfig) -> Changes:
    """The first rotation in every layer."""
    return {"layers": {"rope": config.ropes[0]}}


FEATURES: dict[str, list[Changes | Callable[[DecoderConfig], Changes]]] = {
    "gemma2": [
        {"attention_softcap": 0.0}, {"logit_softcap": 0.0}, {"embedding_scale": 1.0}, {"norm_offset": 0.0},
        {"attention_scale": None}, {"activation": "silu"}, {"layers": {"window": None}}, {"layers": {"window": 20}},
        {"norms": LayerNorms(before_feed_forward="pre_feedforward_layernorm")},
    ],
    "gemma3": [
        {"qk_norm": "none"}, {"layers": {"rope": STRETCHED}}, {"layers": {"rope": NEARBY}},
        {"layers": {"window": None}}, {"embedding_scale": 1.0}, {"norm_offset": 0.0},
        {"attention_scale": None}, {"activation": "silu"},
    ],
    "gemma4": [
        {"qk_norm": "none"}, {"value_norm": False}, {"layer_scalar": False}, {"layers": {"window": None}},
        {"layers": {"rope": ROTATION}}, {"attention_scale": None}, {"logit_softcap": 0.0}, {"embedding_scale": 1.0},
    ],
    "gemma4_experts": [
        {"moe": {"top_k": 2}}, {"moe": {"activation": "silu"}}, {"moe": {"scoring": "sigmoid"}},
    ],
    "gemma4_shared": [
        {"value_norm": False}, {"layers": {"kv_from": (None, None, None, None, 2, 2, 1)}},
        {"layers": {"kv_from": (None, None, None, None, 0, 2, 3)}},
    ],
    "phi3": [{"layers": {"window": None}}],
    "phi3_short": [{"layers": {"rope": ROTATION}}],
    "phi3_long": [{"layers": {"rope": ROTATION}}, {"layers": {"rotary_dim": None, "rope": ROTATION}}],
    "granite": [
        {"embedding_scale": 1.0}, {"residual_multiplier": 1.0}, {"attention_scale": None}, {"logit_scale": 1.0},
    ],
    "olmo2": [{"qk_norm": "none"}, {"norms": LayerNorms(before_attention=None, before_feed_forward=None)}],
    "glm": [{"layers": {"rotary_dim": None}}, {"rope_interleaved": False}, {"qkv_bias": False}],
    "glm4": [{"layers": {"rotary_dim": None}}, {"rope_interleaved": False}, {"norms": LayerNorms()}],
    "smollm3": [all_turned],
    "smollm3_window": [{"layers": {"window": None}}],
    "smollm3_listed_windows": [{"layers": {"window": None}}],
    "mixtral": [{"layers": {"window": None}}, {"moe": {"renormalize": False}}, {"moe": {"top_k": 1}}],
    "qwen2_moe": [
        {"layers": {"window": None}}, {"qkv_bias": False}, {"moe": {"renormalize": True}},
        {"moe": {"shared_gate": False}}, {"moe": {"shared_size": 0}}, {"moe": {"scoring": "softmax_of_chosen"}},
    ],
    "qwen3_moe": [{"qk_norm": "none"}, {"moe": {"renormalize": False}}, {"moe": {"top_k": 2}}],
    "gpt_oss": [
        {"layers": {"sinks": False}}, {"layers": {"window": None}}, {"layers": {"window": 20}},
        {"layers": {"rope": ROTATION}}, {"layers": {"rope": TRUNCATED}}, {"qkv_bias": False}, {"out_bias": False},
        {"moe": {"bias": False}}, {"moe": {"scoring": "softmax"}}, {"moe": {"swiglu_alpha": 1.702}},
        {"moe": {"swiglu_limit": 7.0}}, {"moe": {"swiglu_limit": None}},
    ],
    "deepseek_v2_lite": [
        {"attention_scale": None}, {"layers": {"rope": ROTATION}}, {"rope_interleaved": False}, {"moe": {"scale": 1.0}},
        {"moe": {"renormalize": True}}, {"moe": {"scoring": "softmax_of_chosen"}}, {"moe": {"shared_size": 0}},
    ],
    "deepseek_v2": [{"qkv_bias": False}, {"out_bias": False}, {"moe": {"groups": 1}}, {"rope_interleaved": False}],
    "deepseek_v3": [
        {"attention_scale": None}, {"rope_interleaved": False}, {"moe": {"groups": 1}}, {"moe": {"choice_bias": False}},
        {"moe": {"renormalize": False}}, {"moe": {"scale": 1.0}}, {"moe": {"scoring": "softmax"}},
        {"moe": {"group_score": "max"}},
    ],
    "ministral3": [
        {"query_growth": None}, {"query_growth": QueryGrowth(beta=0.3, original=32)}, {"layers": {"rope": ROTATION}},
    ],
    "mistral4": [
        {"query_growth": None}, {"attention_scale": None}, {"rope_interleaved": False}, {"moe": {"groups": 1}},
        {"moe": {"scoring": "sigmoid"}}, {"moe": {"renormalize": False}}, {"moe": {"scale": 1.0}},
    ],
    "glm4_moe": [
        {"qk_norm": "none"}, {"layers": {"rotary_dim": None}}, {"rope_interleaved": True}, {"moe": {"groups": 1}},
        {"moe": {"choice_bias": False}}, {"moe": {"scale": 1.0}}, {"moe": {"scoring": "softmax"}},
    ],
    "glm4_moe_biases": [{"qkv_bias": False}, {"moe": {"renormalize": True}}],
    "minimax_m2": [
        {"qk_norm": "none"}, {"layers": {"rotary_dim": None}}, {"moe": {"choice_bias": False}},
        {"moe": {"scoring": "softmax"}}, {"moe": {"renormalize": False}},
    ],
    "mimo_v2": [
        {"value_scale": 1.0}, {"layers": {"rope": ROTATION}}, {"layers": {"sinks": False}}, {"layers": {"window": 20}},
        {"moe": {"choice_bias": False}}, {"layers": {"window": None}},
    ],
    "llama4": [
        {"query_growth": None}, {"qk_norm": "none"}, {"layers": {"chunk": None}}, {"layers": {"rope": None}},
        {"rope_interleaved": False}, {"moe": {"weighs_inputs": False}}, {"moe": {"top_k": 1}},
        {"moe": {"scoring": "softmax"}}, {"moe": {"shared_size": 0}},
        {"query_growth": QueryGrowth(beta=0.3, original=9, unrotated=True)},
    ],
    "exaone4": [
        {"qk_norm": "none"}, all_turned, {"layers": {"window": None}},
        {"norms": LayerNorms(before_attention=None, before_feed_forward=None)},
    ],
    "exaone_moe": [
        {"qk_norm": "none"}, all_turned, {"layers": {"window": None}}, {"moe": {"groups": 1}},
        {"moe": {"choice_bias": False}}, {"moe": {"scale": 1.0}}, {"moe": {"shared_size": 0}},
    ],
    "seed_oss": [{"qkv_bias": False}, {"out_bias": False}, {"mlp_bias": False}],
    "gemma": [{"norm_offset": 0.0}, {"embedding_scale": 1.0}, {"activation": "silu"}],
    "ernie4_5": [{"rope_interleaved": False}, {"qkv_bias": False}, {"out_bias": False}, {"mlp_bias": False}],
    "ernie4_5_moe": [
        {"rope_interleaved": False}, {"moe": {"choice_bias": False}}, {"moe": {"renormalize": False}},
        {"moe": {"scoring": "sigmoid"}}, {"moe": {"shared_size": 0}},
    ],
    "dots1": [
        {"qk_norm": "none"}, {"layers": {"window": None}}, {"moe": {"groups": 1}}, {"moe": {"choice_bias": False}},
        {"moe": {"scale": 1.0}},
    ],
    "granite4": [
        {"layers": {"rope": None}}, {"embedding_scale": 1.0}, {"residual_multiplier": 1.0},
        {"attention_scale": None}, {"logit_scale": 1.0},
    ],
    "granite4_without_rotation": [{"layers": {"rope": ROTATION}}],
    "cohere2": [
        all_turned, {"rope_interleaved": False}, {"layers": {"window": None}}, {"logit_scale": 1.0},
        {"qkv_bias": False},
    ],
    "falcon": [
        {"mlp_bias": False}, {"qkv_bias": False},
        {"layer_norms": LayerNormBlock(parallel=True, ungated="relu2")},
    ],
    "falcon_newer": [{"qkv_by_group": False}],
    "falcon_in_turn": [{"qkv_by_group": False}, {"layer_norms": LayerNormBlock(parallel=True, ungated="gelu")}],
    "gpt_neox": [
        {"layers": {"rotary_dim": None}}, {"layer_norms": LayerNormBlock(ungated="gelu")}, {"qkv_by_group": False},
    ],
    "phi": [{"layers": {"rotary_dim": None}}, {"head_bias": False}, {"mlp_bias": False}],
    "nemotron": [
        {"norm_offset": 0.0}, {"layers": {"rotary_dim": None}}, {"layer_norms": LayerNormBlock(ungated="gelu")},
    ],
    "starcoder2": [{"layers": {"window": None}}, {"mlp_bias": False}],
    "deepseek_v3_halves": [{"rope_interleaved": True}, {"moe": {"renormalize": True}}],
}  # fmt: skip


def last_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of a prompt's last token."""
    seen, plain = [], pair.decoder.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(plain(hidden).clone())
        return seen[-1].clone()

    monkeypatch.setattr(pair.decoder, "logits", record)
    driver = Driver(pair.runner())
    driver.submit(0, make_prompt(LENGTH))
    driver.run({0: LENGTH})
    return seen[0][0]


@pytest.fixture(scope="module", params=list(FEATURES))
def name_and_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pair]:
    return request.param, Pair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


def test_without_any_feature_the_logits_are_others(
    name_and_pair: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pair = name_and_pair
    expected = pair.logits(make_prompt(LENGTH))[-1]
    torch.testing.assert_close(last_logits(pair, monkeypatch), expected, atol=TOLERANCE, rtol=TOLERANCE)
    for feature in FEATURES[name]:
        changes = feature(pair.config) if callable(feature) else feature
        wrong = last_logits(pair.mistaken(**changes), monkeypatch)
        assert (wrong - expected).abs().max() > CLEAR, f"{name} is the same with {changes}"
