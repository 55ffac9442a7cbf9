"""Memory is divided before it is taken, and what cannot fit is refused with both numbers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from troupellm.models.load.architecture import describe_model
from troupellm.models.memory.plan import CPU_KV_LIMIT, block_bytes, plan_memory
from troupellm.models.memory.weight_count import weight_count
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES

GIB = 2**30
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip

LATENT = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def plan(folder: Path, available: int = 64 * GIB, **settings: object):
    return plan_memory(describe_model(folder), EngineConfig.from_flat(settings), torch.float32, available)


def test_the_default_is_no_more_than_all_sequences_can_use(folder: Path) -> None:
    budget = plan(folder, max_num_seqs=8)
    assert budget.num_blocks == 8 * 2048 // 16
    assert budget.max_model_len == 2048
    assert budget.kv_cache_bytes == budget.num_blocks * block_bytes(describe_model(folder), 16, torch.float32)


def test_yarn_stretches_the_context_from_the_trained_one(tmp_path: Path) -> None:
    """Models' cards say to put in a factor, and leave `max_position_embeddings` as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2000, "rope_theta": 10000.0}
    transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], rope_parameters=yarn).save_pretrained(
        tmp_path
    )
    assert plan(tmp_path, max_num_seqs=1).max_model_len == 8000
    assert plan(tmp_path, max_num_seqs=1, max_model_len=8000).max_model_len == 8000
    with pytest.raises(ConfigError, match="max_model_len 8001 is beyond the model's own limit of 8000"):
        plan(tmp_path, max_num_seqs=1, max_model_len=8001)


def test_the_default_leaves_a_laptop_its_memory(folder: Path) -> None:
    many = plan(folder, max_num_seqs=100_000)
    assert CPU_KV_LIMIT * 0.99 < many.kv_cache_bytes <= CPU_KV_LIMIT
    small = plan(folder, available=GIB, max_num_seqs=4096)
    assert small.kv_cache_bytes < GIB // 2
    used = small.weight_bytes + small.activation_bytes + small.kv_cache_bytes
    assert used + small.free_bytes == GIB


def test_tokens_drawn_behind_drafts_are_counted(folder: Path) -> None:
    def logits(**settings: object) -> int:
        found = plan(folder, max_num_batched_tokens=64, max_num_seqs=10, **settings)
        return found.activation_bytes - plan(folder, max_num_batched_tokens=64, max_num_seqs=1).activation_bytes

    row = 3 * 4 * SIZES["vocab_size"]
    assert logits() == 9 * row
    assert logits(speculative_config={"method": "ngram", "num_speculative_tokens": 4}) == 49 * row
    assert logits(speculative_config={"method": "ngram", "num_speculative_tokens": 8}) == 63 * row, "the step's tokens"


def test_auto_context_shrinks_to_the_cache(folder: Path) -> None:
    assert plan(folder, num_gpu_blocks_override=5, block_size=8).max_model_len == 40
    size = block_bytes(describe_model(folder), 16, torch.float32)
    assert plan(folder, kv_cache_memory_bytes=3 * size + 1).num_blocks == 3


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_model_len": 100, "num_gpu_blocks_override": 5}, "max_model_len"),
        ({"max_model_len": 4096}, "max_model_len"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 65 * GIB}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 10_000_000}, "num_gpu_blocks_override"),
    ],
)
def test_refusals_name_the_setting(folder: Path, settings: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(folder, **settings)
    assert caught.value.param == param


def test_a_context_that_does_not_fit_names_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 100 does not fit the KV cache, which holds 80 tokens"):
        plan(folder, max_model_len=100, num_gpu_blocks_override=5)


def test_no_room_at_all(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no room for one KV block"):
        plan(folder, available=0)


def test_weights_are_counted_exactly(tmp_path: Path) -> None:
    for number, config in enumerate(
        (
            transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
            transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
            transformers.Qwen3Config(**SIZES, head_dim=32),
            transformers.MixtralConfig(**SIZES, num_local_experts=4),
            transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[0]),
            transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
            transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
            transformers.DeepseekV2Config(**LATENT, q_lora_rank=None),
            transformers.DeepseekV2Config(**LATENT, q_lora_rank=24, attention_bias=True, first_k_dense_replace=1),
            *(FAMILIES[name]() for name in ("gemma4", "gemma4_experts", "gemma4_shared", "mimo_v2", "llama4")),
        )
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / str(number))
        counted, stored = weight_count(describe_model(tmp_path / str(number))), model.state_dict()
        buffers = [buffer for name, buffer in model.named_buffers() if name in stored]
        assert counted == sum(tensor.numel() for tensor in (*model.parameters(), *buffers))


def test_of_experts_only_the_chosen_ones_are_active(tmp_path: Path) -> None:
    transformers.MixtralConfig(**SIZES, num_local_experts=4, architectures=["MixtralForCausalLM"]).save_pretrained(
        tmp_path
    )
    model = describe_model(tmp_path)
    assert model.experts is not None
    expert = 3 * model.hidden_size * model.experts.intermediate_size
    total, active = (weight_count(model, active=active) for active in (False, True))
    assert total - active == model.num_layers * (4 - 2) * expert
    assert "B parameters" in plan(tmp_path).table().splitlines()[0]


def test_the_table_names_every_use(folder: Path) -> None:
    lines = plan(folder).table().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["weights", "activations", "KV cache", "left free"]
    assert "context 2048" in lines[2]


LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "full_attn_idxs": [1],
}  # fmt: skip
STATE = 2 * 2 * 64 * 4
"""Two layers that keep two inputs of 64 channels."""


@pytest.fixture
def stateful(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    return tmp_path


def test_states_have_two_lines_in_the_table(stateful: Path) -> None:
    budget = plan(stateful, max_num_seqs=8, max_state_snapshots_bytes=10 * STATE)
    assert (budget.state_bytes, budget.state_rows, budget.state_snapshots) == (STATE, 8, 10)
    assert "states" in budget.table()
    assert f"8 rows, {STATE:,} bytes each" in budget.table()
    assert "10 prefixes" in budget.table()
    assert budget.state_slots == 18


def test_snapshots_take_a_tenth_of_the_cache_and_never_outnumber_its_blocks(stateful: Path) -> None:
    block = block_bytes(describe_model(stateful), 16, torch.float32)
    assert plan(stateful, num_gpu_blocks_override=40).state_snapshots == 40 * block // 10 // STATE
    assert plan(stateful, num_gpu_blocks_override=40, max_state_snapshots_bytes=GIB).state_snapshots == 40
    assert plan(stateful, enable_prefix_caching=False).state_snapshots == 0
    assert plan(stateful, max_state_snapshots_bytes=0).state_snapshots == 0


def test_more_sequences_than_states_fit_are_refused_with_the_bytes_of_each(stateful: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_num_seqs 10000000 needs .* bytes of states, {STATE} for each") as info:
        plan(stateful, available=GIB, max_num_seqs=10_000_000)
    assert info.value.param == "max_num_seqs"


def test_a_model_without_states_has_no_line_of_them(folder: Path) -> None:
    assert "states" not in plan(folder).table()
    assert plan(folder).state_slots == 0
