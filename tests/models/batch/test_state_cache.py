"""Copies of states: all sources are read before any target is written."""

import torch

from troupellm.models.batch.state_cache import StateCache
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.lfm2 import describe
from troupellm.models.layers.states import has_states, state_bytes
from troupellm.protocol.messages.copies import NO_STATE, StateCopy

CONFIG = describe(
    ConfigReader(
        {
            "architectures": ["Lfm2ForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "conv_L_cache": 4,
            "full_attn_idxs": [1],
        }
    )
)


def filled(num_slots: int) -> StateCache:
    cache = StateCache(CONFIG, num_slots, torch.float32)
    for part in cache.parts:
        part[:] = torch.arange(num_slots, dtype=torch.float32)[:, None, None] + 1
    return cache


def test_states_take_the_bytes_that_were_planned() -> None:
    cache = StateCache(CONFIG, 5, torch.bfloat16)
    assert sum(part.nbytes for part in cache.parts) == 5 * state_bytes(CONFIG, torch.bfloat16)
    assert has_states(CONFIG)
    assert not has_states(CONFIG.with_layers(mixer="attention"))
    assert state_bytes(CONFIG.with_layers(mixer="attention"), torch.float32) == 0


def test_copies_that_follow_each_other_read_what_was_there_before() -> None:
    cache = filled(5)
    cache.copy([StateCopy(0, 1), StateCopy(1, 2), StateCopy(NO_STATE, 0), StateCopy(3, 3)])
    for part in cache.parts:
        assert part[:, 0, 0].tolist() == [0, 1, 2, 4, 5]


def test_a_slot_changes_in_all_layers_and_no_other_does() -> None:
    cache = filled(4)
    cache.fill([2], 9.0)
    assert len(cache.parts) == 2
    for part in cache.parts:
        assert part[:, -1, -1].tolist() == [1, 2, 9, 4]
