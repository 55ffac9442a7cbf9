"""Which values of vLLM's settings are accepted, wherever they are given."""

import logging
from typing import Any

import pytest

from troupellm import EngineConfig, SamplingParams
from troupellm.protocol.errors import ConfigError, InvalidRequest
from troupellm.protocol.params.output_kind import RequestOutputKind
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.protocol.vllm.names import SENTENCES, ModelRegistry, initialize_ray_cluster
from troupellm.protocol.vllm.values import ACCEPTED, accepts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 1), ("pipeline_parallel_size", 1), ("enable_lora", False), ("swap_space", 0.0),
        ("compilation_config", 0), ("compilation_config", {"mode": 0}), ("compilation_config", {"mode": "NONE"}),
        ("compilation_config", {}), ("hf_overrides", None), ("distributed_executor_backend", "mp"),
        ("tokenizer_mode", "auto"), ("cpu_offload_gb", 0), ("disable_custom_all_reduce", True), ("task", "auto"),
        ("limit_mm_per_prompt", {}), ("max_num_seqs", None), ("max_model_len", None), ("max_model_len", -1),
        ("model_impl", "auto"), ("quantization", "None"), ("disable_log_stats", True), ("pooler_config", None),
        ("structured_outputs_config", {"backend": "auto"}), ("enable_prefix_caching", None),
    ],
)  # fmt: skip
def test_a_value_that_says_how_it_is_anyway_changes_nothing(name: str, value: Any) -> None:
    assert EngineConfig.from_flat({name: value}) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2), ("pipeline_parallel_size", True + 1), ("enable_lora_bias", True),
        ("swap_space", 4),
        ("compilation_config", 3), ("compilation_config", {"mode": 3}), ("compilation_config", {"mode": 0, "x": 1}),
        ("compilation_config", "{"), ("hf_overrides", {"a": 1}), ("distributed_executor_backend", "ray"),
        ("tokenizer_mode", "mistral"), ("cpu_offload_gb", 0.5), ("task", "embed"), ("trust_remote_code", "maybe"),
    ],
)  # fmt: skip
def test_any_other_value_is_answered_with_the_sentence_of_the_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat({name: value})
    sentence = REFUSED[name.replace("_", "-")]
    assert caught.value.message == f"{name} is known from vLLM but not supported here: {sentence}"
    assert caught.value.param == name


def test_remote_code_that_is_trusted_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="troupellm.config"):
        assert EngineConfig.from_flat({"trust_remote_code": True}) == EngineConfig()
    assert caplog.messages == [f"trust_remote_code is ignored: {REFUSED['trust-remote-code']}"]


def test_the_table_names_settings_of_vllm_that_are_refused_otherwise() -> None:
    assert ACCEPTED.keys() <= REFUSED.keys()
    for name, values in ACCEPTED.items():
        assert all(accepts(name, value) and accepts(name, str(value)) for value in values), name


def test_other_spellings_of_vllm_become_settings_of_ours() -> None:
    config = EngineConfig.from_flat(
        {
            "pooler_config": {"pooling_type": "MEAN"},
            "model_impl": "vllm",
            "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        }
    )
    assert config.model.pooler_config == '{"pooling_type": "MEAN"}'
    assert config.model.model_impl == "troupellm"
    assert (config.guide.guide_backend, config.guide.guide_any_whitespace) == ("guidance", False)
    with pytest.raises(ConfigError, match="structured_outputs_config: frog is not supported"):
        EngineConfig.from_flat({"structured_outputs_config": {"frog": 1}})


def test_a_refused_name_says_what_to_do_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match=SENTENCES["ModelRegistry"]):
        ModelRegistry.register_model("Mine", object)
    with pytest.raises(ConfigError, match="one server per device"):
        initialize_ray_cluster(None)
    assert not hasattr(ModelRegistry, "__wrapped__")


def test_an_assigned_field_is_checked_as_in_the_constructor() -> None:
    params = SamplingParams()
    params.max_tokens, params.temperature = 5, 0.5
    params.output_kind = RequestOutputKind.DELTA
    assert params == SamplingParams(max_tokens=5, temperature=0.5, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(InvalidRequest, match="temperature"):
        params.temperature = 5.0
    assert params.temperature == 0.5
    with pytest.raises(InvalidRequest, match="output_kind must be a RequestOutputKind"):
        SamplingParams(output_kind=1)  # type: ignore[arg-type]
    for wanted in (StructuredOutputsParams(regex="a+"), StructuredOutputsParams(choice=["b"])):
        params.structured_outputs = wanted
        assert params.guide == wanted.spec()
        assert params.structured_outputs is None


def test_output_kinds_have_vllms_numbers() -> None:
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0),
        ("DELTA", 1),
        ("FINAL_ONLY", 2),
    ]
