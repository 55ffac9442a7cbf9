"""Rotary frequencies of every scaling equal those of `transformers`."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from troupellm.models.config.hf_config import ConfigReader, rope_config
from troupellm.models.layers.rope import rope_frequencies, rope_tables

LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_theta": 500000.0},
    "yarn": {**YARN, "factor": 4.0},
    "yarn_not_truncated": {**YARN, "factor": 4.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_mscale": {**YARN, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_attention_factor": {**YARN, "factor": 4.0, "attention_factor": 1.25},
    "longrope": LONG,
}  # fmt: skip


@pytest.mark.parametrize("length", [64, 256, 512])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_frequencies_are_those_of_transformers(name: str, length: int) -> None:
    scaling = SCALINGS[name]
    reference = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(scaling)
    )
    if name == "yarn_not_truncated":
        reference.rope_parameters["truncate"] = False
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"), seq_len=length)
    config = rope_config(ConfigReader(reference.to_dict()), 16)
    got, factor = rope_frequencies(config, 16, length)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    assert factor == pytest.approx(amplitude)


@pytest.mark.parametrize("kind", ["yarn", "llama3", "dynamic"])
def test_the_trained_length_beside_the_section_goes_first_where_it_is_asked_for(kind: str) -> None:
    """Published files have it in the section, beside it, or both."""
    scaling = {**SCALINGS[kind], "original_max_position_embeddings": 64}
    reference = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_parameters=dict(scaling),
    )
    values = {**reference.to_dict(), "original_max_position_embeddings": 128, "rope_parameters": scaling}
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](reference, torch.device("cpu"), seq_len=512)
    got, factor = rope_frequencies(rope_config(ConfigReader(values), 16), 16, 512)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    assert factor == pytest.approx(amplitude)


def test_yarn_with_a_factor_of_its_own_on_cosine_and_sine() -> None:
    """DeepSeek-R1-0528-Qwen3-8B takes back what YaRN would multiply by."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    values = {"max_position_embeddings": 131072, "rope_theta": 1e6}
    amplitudes = [
        rope_frequencies(rope_config(ConfigReader({**values, "rope_scaling": {**scaling, **more}}), 128), 128, 4096)[1]
        for more in ({}, {"attn_factor": 0.8782488562869419})
    ]
    assert amplitudes == [pytest.approx(1.1386, abs=1e-4), pytest.approx(1.0)]


def test_tables_are_cosine_and_sine_of_position_times_frequency() -> None:
    config = rope_config(ConfigReader({"rope_theta": 100.0, "max_position_embeddings": 8}), 4)
    cos, sin = rope_tables(config, 4, 8, torch.float32)
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(cos[:, 0], angles.cos())
    torch.testing.assert_close(sin[:, 0], angles.sin())
