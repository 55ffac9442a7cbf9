"""Each feature of a family beyond Llama matters in the small checkpoints: without any one of it, the logits are others.

Otherwise a family whose description forgets something could equal `transformers` all the same.
"""

from typing import Any

import pytest
import torch

from troupellm.models.config.decoder_config import LayerNormBlock, LayerNorms, QueryGrowth, RopeConfig
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt

LENGTH = 45
CLEAR = 0.01
"""A hundred times what parity forgives."""
ROTATION, NEARBY = RopeConfig(theta=10000.0), RopeConfig(theta=100.0)
TRUNCATED = RopeConfig(kind="yarn", theta=10000.0, factor=8.0, original_max_position=32)
FEATURES: dict[str, list[dict[str, Any]]] = {
    "gemma2": [
        {"attention_softcap": 0.0}, {"logit_softcap": 0.0}, {"embedding_scale": 1.0}, {"norm_offset": 0.0},
        {"attention_scale": None}, {"activation": "silu"}, {"windows": (None, None)}, {"windows": (20, 20)},
        {"norms": LayerNorms(before_feed_forward="pre_feedforward_layernorm")},
    ],
    "gemma3": [
        {"qk_norm": "none"}, {"layer_ropes": ()}, {"layer_ropes": (NEARBY, NEARBY, NEARBY)},
        {"windows": (None, None, None)}, {"embedding_scale": 1.0}, {"norm_offset": 0.0},
        {"attention_scale": None}, {"activation": "silu"},
    ],
    "phi3": [{"windows": (None, None)}],
    "phi3_short": [{"rope": ROTATION}],
    "phi3_long": [{"rope": ROTATION}, {"rotary_dim": None, "rope": ROTATION}],
    "granite": [
        {"embedding_scale": 1.0}, {"residual_multiplier": 1.0}, {"attention_scale": None}, {"logit_scale": 1.0},
    ],
    "olmo2": [{"qk_norm": "none"}, {"norms": LayerNorms(before_attention=None, before_feed_forward=None)}],
    "glm": [{"rotary_dim": None}, {"rope_interleaved": False}, {"qkv_bias": False}],
    "glm4": [{"rotary_dim": None}, {"rope_interleaved": False}, {"norms": LayerNorms()}],
    "smollm3": [{"layer_ropes": ()}],
    "smollm3_window": [{"windows": (None, None)}],
    "smollm3_listed_windows": [{"windows": (None, None)}],
    "mixtral": [{"windows": (None, None)}, {"moe": {"renormalize": False}}, {"moe": {"top_k": 1}}],
    "qwen2_moe": [
        {"windows": (None, None, None)}, {"qkv_bias": False}, {"moe": {"renormalize": True}},
        {"moe": {"shared_gate": False}}, {"moe": {"shared_size": 0}}, {"moe": {"scoring": "softmax_of_chosen"}},
    ],
    "qwen3_moe": [{"qk_norm": "none"}, {"moe": {"renormalize": False}}, {"moe": {"top_k": 2}}],
    "gpt_oss": [
        {"attention_sinks": False}, {"windows": (None, None, None)}, {"windows": (20, 20, 20)}, {"rope": ROTATION},
        {"rope": TRUNCATED}, {"qkv_bias": False}, {"out_bias": False}, {"moe": {"bias": False}},
        {"moe": {"scoring": "softmax"}}, {"moe": {"swiglu_alpha": 1.702}}, {"moe": {"swiglu_limit": 7.0}},
        {"moe": {"swiglu_limit": None}},
    ],
    "deepseek_v2_lite": [
        {"attention_scale": None}, {"rope": ROTATION}, {"rope_interleaved": False}, {"moe": {"scale": 1.0}},
        {"moe": {"renormalize": True}}, {"moe": {"scoring": "softmax_of_chosen"}}, {"moe": {"shared_size": 0}},
    ],
    "deepseek_v2": [{"qkv_bias": False}, {"out_bias": False}, {"moe": {"groups": 1}}, {"rope_interleaved": False}],
    "deepseek_v3": [
        {"attention_scale": None}, {"rope_interleaved": False}, {"moe": {"groups": 1}}, {"moe": {"choice_bias": False}},
        {"moe": {"renormalize": False}}, {"moe": {"scale": 1.0}}, {"moe": {"scoring": "softmax"}},
        {"moe": {"group_score": "max"}},
    ],
    "ministral3": [{"query_growth": None}, {"query_growth": QueryGrowth(beta=0.3, original=32)}, {"rope": ROTATION}],
    "mistral4": [
        {"query_growth": None}, {"attention_scale": None}, {"rope_interleaved": False}, {"moe": {"groups": 1}},
        {"moe": {"scoring": "sigmoid"}}, {"moe": {"renormalize": False}}, {"moe": {"scale": 1.0}},
    ],
    "glm4_moe": [
        {"qk_norm": "none"}, {"rotary_dim": None}, {"rope_interleaved": True}, {"moe": {"groups": 1}},
        {"moe": {"choice_bias": False}}, {"moe": {"scale": 1.0}}, {"moe": {"scoring": "softmax"}},
    ],
    "glm4_moe_biases": [{"qkv_bias": False}, {"moe": {"renormalize": True}}],
    "minimax_m2": [
        {"qk_norm": "none"}, {"rotary_dim": None}, {"moe": {"choice_bias": False}}, {"moe": {"scoring": "softmax"}},
        {"moe": {"renormalize": False}},
    ],
    "exaone4": [
        {"qk_norm": "none"}, {"layer_ropes": ()}, {"windows": (None, None, None)},
        {"norms": LayerNorms(before_attention=None, before_feed_forward=None)},
    ],
    "exaone_moe": [
        {"qk_norm": "none"}, {"layer_ropes": ()}, {"windows": (None, None, None)}, {"moe": {"groups": 1}},
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
        {"qk_norm": "none"}, {"windows": (None, None, None)}, {"moe": {"groups": 1}}, {"moe": {"choice_bias": False}},
        {"moe": {"scale": 1.0}},
    ],
    "granite4": [
        {"layer_ropes": (None, None)}, {"embedding_scale": 1.0}, {"residual_multiplier": 1.0},
        {"attention_scale": None}, {"logit_scale": 1.0},
    ],
    "granite4_without_rotation": [{"layer_ropes": ()}],
    "cohere2": [
        {"layer_ropes": ()}, {"rope_interleaved": False}, {"windows": (None, None, None)}, {"logit_scale": 1.0},
        {"qkv_bias": False},
    ],
    "falcon": [
        {"mlp_bias": False}, {"qkv_bias": False},
        {"layer_norms": LayerNormBlock(parallel=True, ungated="relu2")},
    ],
    "falcon_newer": [{"qkv_by_group": False}],
    "falcon_in_turn": [{"qkv_by_group": False}, {"layer_norms": LayerNormBlock(parallel=True, ungated="gelu")}],
    "gpt_neox": [{"rotary_dim": None}, {"layer_norms": LayerNormBlock(ungated="gelu")}, {"qkv_by_group": False}],
    "phi": [{"rotary_dim": None}, {"head_bias": False}, {"mlp_bias": False}],
    "nemotron": [{"norm_offset": 0.0}, {"rotary_dim": None}, {"layer_norms": LayerNormBlock(ungated="gelu")}],
    "starcoder2": [{"windows": (None, None)}, {"mlp_bias": False}],
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
    for changes in FEATURES[name]:
        wrong = last_logits(pair.mistaken(**changes), monkeypatch)
        assert (wrong - expected).abs().max() > CLEAR, f"{name} is the same with {changes}"
