"""Settings as scripts for vLLM give them to `LLM` and `EngineArgs`, as settings of ours."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.protocol.vllm.values import check_refused

STRUCTURED: Final = "structured_outputs_config"
NO_EFFECT: Final = frozenset({"disable_log_stats", "enable_prompt_embeds"})
"""Settings that mean something to a server alone: an engine without one writes no statistics line, and takes input
embeddings from its caller."""
_SAME: Final[dict[str, dict[Any, Any]]] = {
    "model_impl": {"vllm": "troupellm"},
    "max_model_len": {-1: "auto", None: "auto"},
    "kv_cache_dtype": {"float16": "auto", "bfloat16": "auto"},
}
"""Other spellings of values."""


def own_settings(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings that are ours, without those of vLLM whose values say how this engine works anyway.

    None stands for a setting that was not given.

    Args:
        known: names of settings of ours.

    Raises:
        ConfigError: a setting of vLLM asks for what is not supported; the sentence says what to use.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if name in NO_EFFECT:
            continue
        if name == STRUCTURED:
            found.update(guide_settings(value))
        elif name in known:
            if value is not None:
                found[name] = _usual(name, value)
        elif flag in REFUSED:
            check_refused(flag, value, label=name)
        else:
            found[name] = value
    return found


def guide_settings(value: Any, *, label: str = STRUCTURED) -> dict[str, Any]:
    """vLLM's config of structured outputs, a mapping or None, as settings of ours.

    Raises:
        ConfigError: the value is no mapping, or a key asks for what is not supported.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label} must be a JSON object", param=label)
    found: dict[str, Any] = {}
    for key, wanted in value.items():
        match key, wanted:
            case "backend", str():
                found["guide_backend"] = wanted
            case "disable_any_whitespace", bool():
                found["guide_any_whitespace"] = not wanted
            case "disable_additional_properties", bool():
                found["guide_additional_properties"] = not wanted
            case ("disable_fallback", bool()) | ("enable_in_reasoning", False) | ("reasoning_parser", str()):
                pass  # no backend is ever replaced; guides sleep until thinking ends; the parser has its own setting
            case _:
                known = "backend, disable_any_whitespace, disable_additional_properties"
                raise ConfigError(f"{label}: {key} is not supported with {wanted!r}; use {known}", param=label)
    return found


def _usual(name: str, value: Any) -> Any:
    if name == "pooler_config" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    if name == "quantization" and isinstance(value, str) and value.lower() == "none":
        return None
    if isinstance(value, str | int):
        return _SAME.get(name, {}).get(value, value)
    return value
