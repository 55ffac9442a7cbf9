"""The settings in config.json of DeepSeek's families, and those that are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from troupellm.kernels.fused_moe import route
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.layers import experts
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.memory.plan import block_bytes, model_limit
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair

LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
THIRD = {
    **LITE, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 1536, "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip


def described(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return describe_decoder(ConfigReader({**values, **changes}))


def test_the_first_files_are_understood() -> None:
    lite, third = described(LITE), described(THIRD)
    assert None not in (lite.mla, lite.experts, third.mla, third.experts)
    last = lite.layers[-1]
    assert (last.num_kv_heads, last.head_dim, last.rotary_dim, lite.mla.query_latent) == (1, 576, 64, None)
    assert (lite.experts.groups, lite.experts.shared_size) == (1, 2816)
    assert [shape.experts is None for shape in lite.layers].count(False) == 26
    assert lite.attention_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert (third.mla.query_latent, third.experts.groups, third.experts.top_groups) == (1536, 8, 4)
    assert (third.experts.choice_bias, third.experts.renormalize, third.experts.scoring) == (True, True, "sigmoid")


@pytest.mark.parametrize(
    "rotation",
    [
        LITE["rope_scaling"],  # as the published files have it
        {"type": "linear", "factor": 4.0},
        {"type": "dynamic", "factor": 4.0},
        None,
    ],
)
def test_no_rotation_stretches_sequences_beyond_the_keys_of_the_indexer(rotation: dict[str, Any] | None) -> None:
    """Beyond them a token would see all keys where the model sees the chosen ones."""
    changes = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048, "rope_scaling": rotation}
    sparse = described(THIRD, **changes)
    assert model_limit(sparse, EngineConfig.from_flat({"model": "m"})) == 2048
    assert model_limit(sparse, EngineConfig.from_flat({"model": "m", "max_model_len": 2048})) == 2048
    with pytest.raises(ConfigError, match="max_model_len 2049 is beyond the model's own limit of 2048"):
        model_limit(sparse, EngineConfig.from_flat({"model": "m", "max_model_len": 2049}))


def test_a_token_takes_one_latent_vector_per_layer() -> None:
    lite = described(LITE, num_hidden_layers=2)
    assert block_bytes(lite, 16, torch.bfloat16) == 2 * 16 * 576 * 2
    cache = KVCache(lite, 3, 16, torch.bfloat16)
    assert cache.storage.nbytes == 3 * block_bytes(lite, 16, torch.bfloat16)
    assert all(keys.data_ptr() == values.data_ptr() for keys, values in cache.layers)


@pytest.mark.parametrize(
    ("values", "changes", "key"),
    [
        (LITE, {"topk_method": "noaux_tc"}, "topk_method"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (LITE, {"attention_bias": True}, "attention_bias"),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (LITE, {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        (LITE, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, "n_group"),
        (THIRD, {"scoring_func": "softmax"}, "scoring_func"),
        (THIRD, {"topk_group": 9}, "topk_group"),
        (THIRD, {"n_group": 256}, "n_group"),
    ],
)
def test_what_is_not_built_is_refused_by_name(values: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: {key} must"):
        described(values, **changes)


def test_what_corrects_the_choice_of_experts_is_not_rounded(tmp_path: Path) -> None:
    """It is large beside its differences, so that bfloat16 would leave the same number for all experts."""
    name, bias = "model.layers.3.mlp.gate.e_score_correction_bias", 38.0 + torch.arange(16) / 1024
    assert bool((bias.bfloat16() == 38).all())
    save_file({name: bias}, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint(tmp_path, torch.bfloat16).take(name, (16,)), bias)


def test_the_router_computes_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the models' own code has it: rounded to bfloat16, scores of many experts would be equal."""
    pair, seen = Pair(tmp_path, FAMILIES["deepseek_v3"]()), []
    source = decoder_weights(pair.config, Checkpoint(tmp_path, torch.bfloat16), EMBEDDING)
    part = Decoder(pair.config, source, max_model_len=MAX_LEN).layers[1].feed_forward
    assert isinstance(part, experts.Experts)

    def record(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(logits)
        return route(logits, *rest)

    monkeypatch.setattr(experts, "route", record)
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    weight = pair.reference.model.layers[1].mlp.gate.weight.detach()  # stored in float32, which is kept
    with torch.inference_mode():
        assert part(hidden, 9).dtype == torch.bfloat16
        torch.testing.assert_close(seen[0], hidden.float() @ weight.T, rtol=1e-5, atol=1e-5)


def test_layers_that_draft_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_file(
        {name: torch.zeros(2) for name in ("model.layers.27.eh_proj.weight", "model.layers.27.enorm.weight")},
        tmp_path / "model.safetensors",
    )
    checkpoint = Checkpoint(tmp_path, torch.float32)
    decoder_weights(described(LITE), checkpoint, EMBEDDING)
    checkpoint.finish()
