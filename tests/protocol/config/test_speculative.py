"""`--speculative-config`: vLLM's keys, every wrong one refused by its name."""

from typing import Any

import msgspec
import pytest

from troupellm.protocol.config.speculation import METHODS, MOST_DRAFTS, SpeculativeConfig, read_speculative_config
from troupellm.protocol.errors import ConfigError


def read(**keys: Any) -> SpeculativeConfig:
    config = read_speculative_config(keys)
    assert config is not None
    return config


def test_text_mapping_and_what_was_read_are_the_same() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    config = read(**keys)
    assert config == SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert read_speculative_config(msgspec.json.encode(keys).decode()) == config
    assert read_speculative_config(config) is config
    assert read_speculative_config(None) is read_speculative_config("null") is None


def test_a_speculative_config_crosses_a_process_border() -> None:
    config = read(method="ngram", num_speculative_tokens_per_batch_size=[[1, 4, 5], [5, 8, 0]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=SpeculativeConfig) == config


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"model": "ngram"}, "ngram"), ({"model": "[ngram]"}, "ngram"), ({"method": "ngram_gpu"}, "ngram"),
        ({"method": "deepseek_mtp"}, "mtp"), ({"method": "custom_class", "custom_class": "a:B"}, "custom"),
        ({"model": "some/head"}, None),
    ],
)  # fmt: skip
def test_a_spelling_of_vllm_names_its_method(given: dict[str, Any], method: str | None) -> None:
    assert read(**given).method == method


def test_keys_with_one_meaning_only_may_be_given() -> None:
    assert read(method="eagle", draft_tensor_parallel_size=1) == read(method="eagle")


@pytest.mark.parametrize(
    ("keys", "drafts"),
    [
        ({"method": "ngram"}, 5), ({"method": "ngram", "num_speculative_tokens": 9}, 9), ({"method": "suffix"}, 24),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 900}, MOST_DRAFTS), ({"method": "mtp"}, 1),
        ({"method": "medusa", "tree_widths": [4, 3, 2]}, 9),
    ],
)  # fmt: skip
def test_the_most_drafts_follow_from_the_method(keys: dict[str, Any], drafts: int) -> None:
    assert read(**keys).most_drafts == drafts


def test_a_schedule_bounds_the_drafts_by_the_size_of_the_batch() -> None:
    config = read(
        method="ngram",
        num_speculative_tokens=6,
        num_speculative_tokens_per_batch_size=[[2, 4, 4], [5, 32, 1], [33, 64, 0]],
    )
    assert [config.most_drafts_at(rows) for rows in (1, 2, 4, 5, 32, 33, 64, 65)] == [6, 4, 4, 1, 1, 0, 0, 6]


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        ({}, "method", "must be one of ngram"),
        ({"method": "nonsense"}, "method", f"one of {', '.join(METHODS)}, got nonsense"),
        ({"method": "dflash"}, "method", "must be one of"),
        ({"method": 3}, "method", "Expected `str"),
        ({"method": "ngram", "num_tokens": 3}, "num_tokens", "is unknown; there are method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens", ">= 1"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "num_speculative_tokens", "<= 63"),
        ({"method": "ngram", "num_speculative_tokens": "five"}, "num_speculative_tokens", "got `str`"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min", ">= 1"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min", r"\[1, .* \(3\)\]"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max", "only to ngram"),
        ({"model": "some/head", "prompt_lookup_max": 3}, "prompt_lookup_max", "only to ngram"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, "suffix_decoding_max_tree_depth", "only to suffix"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob", "<= 1"),
        ({"method": "ngram", "model": "some/model"}, "model", "means nothing to the method ngram"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "draft_sample_method", "means nothing"),
        ({"method": "eagle", "quantization": "awq"}, "quantization", "Invalid enum value"),
        ({"method": "custom"}, "custom_class", "must name"),
        ({"method": "ngram", "tree_widths": [2]}, "tree_widths", "only to eagle"),
        ({"method": "medusa", "tree_widths": [2, 2], "num_speculative_tokens": 3}, "tree_widths", "adds up to 4"),
        ({"method": "medusa", "tree_widths": [60, 60]}, "tree_widths", "at most 63"),
        ({"method": "ngram", "synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length", "belongs to"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "synthetic_acceptance_length", "belongs to"),
        (
            {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 7},
            "synthetic_acceptance_length",
            r"\[1, 6\]",
        ),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "rejection_sample_method", "Invalid enum value"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]},
            "num_speculative_tokens_per_batch_size",
            "rising ranges",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 6]]},
            "num_speculative_tokens_per_batch_size",
            "0 to 5 drafts",
        ),
        ({"method": "eagle", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size", "one device"),
        ({"method": "eagle", "parallel_drafting": True}, "parallel_drafting", "known from vLLM but not supported"),
        ({"method": "eagle", "disable_padded_drafter_batch": True}, "disable_padded_drafter_batch", "leave it out"),
    ],
)
def test_a_refused_speculative_config_names_its_key(keys: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        read_speculative_config(keys)
    assert caught.value.param == f"speculative_config.{key}" or (caught.value.param or "").startswith(
        f"speculative_config.{key}["
    )
    assert key in caught.value.message


@pytest.mark.parametrize("value", ["{", "[1]", "ngram", "3", 5, ["ngram"]])
def test_a_speculative_config_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as caught:
        read_speculative_config(value)
    assert caught.value.param == "speculative_config"
