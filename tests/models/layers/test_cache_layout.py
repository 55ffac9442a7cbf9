"""Cache groups of published models: all of them fill equally many slots, and little of a block stays empty."""

from typing import Any

import msgspec
import pytest
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.layers.cache_layout import cache_layout, with_cache_groups
from troupellm.models.memory.plan import block_bytes, check_cells
from troupellm.protocol.errors import ConfigError, ModelLoadError

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144,
}  # fmt: skip
WITH_EXPERTS: dict[str, Any] = {
    **GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}  # fmt: skip
MIMO: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "hybrid_layer_pattern": [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(48)],
    "moe_layer_freq": [0, *[1] * 47],
    "max_position_embeddings": 262144,
    "add_swa_attention_sink_bias": True,
}


def described(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return with_cache_groups(describe_decoder(ConfigReader(values | changes)), 32768, hybrid=True)


@pytest.mark.parametrize(
    ("values", "groups", "slots", "waste"),
    [(GEMMA4, 11, 5, 0.0), (WITH_EXPERTS, 10, 3, 0.08), (E2B, 3, 3, 0.0), (MIMO, 9, 5, 0.03)],
    ids=["31B", "26B-A4B", "E2B", "MiMo-V2-Flash"],
)
def test_groups_of_unequal_layers_waste_little(values: dict[str, Any], groups: int, slots: int, waste: float) -> None:
    model = described(values)
    layout = cache_layout(model)
    assert (len(layout.windows), [store.num_slots for store in layout.stores]) == (groups, [slots])
    assert 1 - sum(layout.group_shares) / groups == pytest.approx(waste, abs=0.006)
    assert sum(layout.group_layers) == sum(shape.kv_from is None for shape in model.layers)


def test_every_layer_has_its_own_part_of_a_block() -> None:
    """A number written for each layer, in each group's blocks, stays there."""
    config = described(E2B, head_dim=32, global_head_dim=64)
    cache = KVCache(config, len(cache_layout(config).windows), 4, torch.float32)
    cache.storage.zero_()
    layout = cache.layout
    own = [layer for layer, shape in enumerate(config.layers) if shape.kv_from is None]
    for layer in own:
        view = layout.views[layout.view_of[layer]]
        for side, part in enumerate(cache.layers[layer]):
            part[view.group * view.stride] = 1 + 2 * layer + side
    for layer, shape in enumerate(config.layers):
        source = layer if shape.kv_from is None else shape.kv_from
        view = layout.views[layout.view_of[layer]]
        for side, part in enumerate(cache.layers[layer]):
            assert (part[view.group * view.stride] == 1 + 2 * source + side).all()
    assert cache.storage.nbytes == cache.num_blocks * block_bytes(config, 4, torch.float32)
    assert (cache.storage > 0).all()


@pytest.mark.parametrize(
    ("kv_heads", "windows"),
    [((3, 4, 5, 5), (8, None, None, 8)), ((8, 1, 1, 1), (None, 8, 8, 8)), ((3, 4, 5, 6), (None,) * 4)],
    ids=["sizes that do not divide the largest", "much would stay empty", "no windows"],
)
def test_otherwise_all_layers_share_one_group(kv_heads: tuple[int, ...], windows: tuple[int | None, ...]) -> None:
    plain = described(E2B, num_hidden_layers=4, num_kv_shared_layers=0, layer_types=None)
    config = plain.with_layers(num_kv_heads=kv_heads, num_heads=60, head_dim=16, window=windows)
    layout = cache_layout(config)
    assert layout.windows == (None,)
    assert sum(store.num_slots for store in layout.stores) == 4
    cache = KVCache(config, 3, 4, torch.bfloat16)
    assert [keys.shape[1] for keys, _ in cache.layers] == list(kv_heads)
    assert sum(storage.nbytes for storage in cache.storages) == 3 * block_bytes(config, 4, torch.bfloat16)


def test_positions_are_moved_in_the_layers_of_their_group_alone() -> None:
    config = described(E2B, head_dim=32, global_head_dim=64)
    cache = KVCache(config, 6, 4, torch.float32)
    cache.storage.copy_(torch.arange(cache.storage.numel()).view_as(cache.storage))
    before, layout = cache.storage.clone(), cache.layout
    group = layout.windows.index(512)
    expected = {
        layer: keys[2 * layout.views[layout.view_of[layer]].stride, :, 3].clone()
        for layer, (keys, _) in enumerate(cache.layers)
        if layout.views[layout.view_of[layer]].group == group
    }
    cache.move(group, [(2, 3)], [(4, 1)])
    for layer, row in expected.items():
        assert torch.equal(cache.layers[layer][0][4 * layout.views[layout.view_of[layer]].stride, :, 1], row)
    changed = (cache.storage != before).flatten(3).any(-1).any(0).any(0)
    assert changed.tolist() == [False, False, False, False, True, False]


def test_scales_beside_heads_of_two_sizes_are_refused() -> None:
    check_cells(described(MIMO), "int8", torch.int8)  # heads are equally large, and their numbers differ
    check_cells(described(E2B), "fp8", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="heads of 256 and 512 numbers share blocks") as caught:
        check_cells(described(E2B), "int8", torch.int8)
    assert caught.value.param == "kv_cache_dtype"
    check_cells(msgspec.structs.replace(described(E2B), hybrid_cache=False), "int8", torch.int8)


@pytest.mark.parametrize(
    ("values", "changes", "said"),
    [
        (E2B, {"num_kv_shared_layers": 31}, "num_kv_shared_layers must leave a layer of every kind"),
        (E2B, {"num_kv_shared_layers": 35}, "num_kv_shared_layers must leave a layer of every kind"),
        (GEMMA4, {"num_global_key_value_heads": 5}, "num_attention_heads must be a multiple of 5"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or vision"),
        (GEMMA4, {"per_layer_config": {"3": {"hidden_size": 8}}}, "per_layer_config.3.hidden_size is not supported"),
        (WITH_EXPERTS, {"top_k_experts": 129}, "top_k_experts must be at most num_experts"),
        (MIMO, {"swa_head_dim": 128}, "swa_head_dim must be head_dim"),
        (MIMO, {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a list of 48 zeros and ones"),
        (MIMO, {"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim must be at most head_dim"),
        (MIMO, {"n_shared_experts": 1}, "n_shared_experts must be null or 0"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(values: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        described(values, **changes)
