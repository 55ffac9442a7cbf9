"""Settings as scripts for vLLM give them to `LLM` and `EngineArgs`, as settings of ours."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from troupellm.protocol.vllm_further import REFUSED
from troupellm.protocol.vllm_values import check_refused

STRUCTURED: Final = "structured_outputs_config"
NO_EFFECT: Final = frozenset({"disable_log_stats"})
"""Settings of the server that scripts also give to an engine without one, which writes no statistics line."""
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
        if name in known:
            if value is not None:
                found[name] = _usual(name, value)
        elif flag in REFUSED:
            check_refused(flag, value, label=name)
        elif name not in NO_EFFECT:
            found[name] = value
    return found


def _usual(name: str, value: Any) -> Any:
    if name == "pooler_config" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    if name == "quantization" and isinstance(value, str) and value.lower() == "none":
        return None
    if isinstance(value, str | int):
        return _SAME.get(name, {}).get(value, value)
    return value
