"""Variables that vLLM's users have in their environment, as settings.

A variable of ours with the same meaning counts before one of these, and these before a configuration file. Other
variables of vLLM change nothing here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from troupellm.protocol.errors import ConfigError

API_KEY = "VLLM_API_KEY"
_SETTINGS = {
    API_KEY: "api_key",
    "VLLM_LOGGING_LEVEL": "log_level",
    "VLLM_LOG_STATS_INTERVAL": "log_stats_interval",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
    "VLLM_TORCH_PROFILER_DIR": "profile_dir",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "keep_alive_timeout",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "step_timeout",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_memory_bytes",
}
_LEVELS = {"warn": "warning", "critical": "error", "fatal": "error", "notset": "debug"}


def vllm_settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Setting, variable and value of each variable that is set to more than an empty text.

    Raises:
        ConfigError: a value is not understood; names the variable.
    """
    for variable, name in _SETTINGS.items():
        if text := environment.get(variable, "").strip():
            value = _value(variable, text)
            if value is not None:
                yield name, variable, value


def _value(variable: str, text: str) -> Any:
    match variable:
        case "VLLM_API_KEY":
            return [text]  # one key, commas and all
        case "VLLM_LOGGING_LEVEL":
            return _LEVELS.get(text.lower(), text.lower())
        case "VLLM_CPU_KVCACHE_SPACE":
            try:
                return int(float(text) * 2**30) or None  # GiB; 0 stands for the default
            except (ValueError, OverflowError):
                raise ConfigError(f"{variable}: {text!r} is not understood", param="kv_cache_memory_bytes") from None
        case _:
            return text
