"""Settings of LoRA adapters."""

from typing import Any

import pytest

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.lora import MOST_ADAPTERS, LoraModule
from troupellm.protocol.errors import ConfigError


def lora(**settings: Any) -> Any:
    return EngineConfig.from_flat({"enable_lora": True, **settings}).lora


def test_adapters_are_named_as_words_as_json_and_as_objects() -> None:
    modules = lora(
        lora_modules=["a=/x=y", '{"name": "b", "path": "/y", "base_model_name": "z"}', {"name": "c/d", "path": "q"}]
    )
    assert modules.modules == (LoraModule("a", "/x=y"), LoraModule("b", "/y", "z"), LoraModule("c/d", "q"))


def test_host_memory_holds_four_times_as_many_adapters_as_a_step_uses() -> None:
    assert lora().host_adapters == 32
    assert lora(max_loras=2).host_adapters == 8
    assert lora(max_loras=2, max_cpu_loras=2).host_adapters == 2


@pytest.mark.parametrize(
    ("settings", "param", "text"),
    [
        ({"enable_lora": False, "lora_modules": ["a=b"]}, "lora_modules", "needs enable_lora"),
        ({"enable_lora": False, "lora_dir": ["d"]}, "lora_dir", "needs enable_lora"),
        ({"lora_modules": ["a"]}, "lora_modules", "give name=folder"),
        ({"lora_modules": ["a="]}, "lora_modules", "give name=folder"),
        ({"lora_modules": ["a=b", "a=c"]}, "lora_modules", "'a' is given twice"),
        ({"lora_modules": ["{"]}, "lora_modules", "give name, path and base_model_name"),
        ({"lora_modules": [{"name": "a", "path": "b", "rank": 1}]}, "lora_modules", "rank"),
        ({"lora_modules": ["../../etc=b"]}, "lora_modules", "no name of an adapter"),
        ({"lora_modules": ["a b=c"]}, "lora_modules", "no name of an adapter"),
        ({"lora_modules": [f"{'a' * 129}=c"]}, "lora_modules", "1 to 128"),
        ({"lora_modules": [f"a{i}=c" for i in range(MOST_ADAPTERS + 1)]}, "lora_modules", "at most 4096"),
        ({"max_loras": 8, "max_cpu_loras": 4}, "max_cpu_loras", "must not be less than max_loras (8)"),
        ({"max_loras": 0}, "max_loras", ">= 1"),
        ({"lora_dtype": "int8"}, "lora_dtype", "int8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lora(**settings)
    assert caught.value.param == param
    assert text in caught.value.message
