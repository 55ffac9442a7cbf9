"""vLLM's flags for structured outputs, as ours."""

import json
from typing import Any

from troupellm.protocol.vllm.settings import guide_settings

CONFIG = "--structured-outputs-config"
_OLD_BACKEND = "--guided-decoding-backend"
_OLD_WHITESPACE = "--guided-decoding-disable-any-whitespace"
_OLD_PROPERTIES = "--guided-decoding-disable-additional-properties"
VALUED = frozenset({CONFIG, _OLD_BACKEND})
"""Those that take the word after them."""


def is_guide_flag(name: str) -> bool:
    """Whether `guide_flags` knows it."""
    return name in VALUED or name in (_OLD_WHITESPACE, _OLD_PROPERTIES) or name.startswith(f"{CONFIG}.")


def takes_value(name: str) -> bool:
    return name in VALUED or name.startswith(f"{CONFIG}.")


def guide_flags(name: str, value: str) -> list[str]:
    """Our flags that say the same.

    Raises:
        ConfigError: no JSON object, or a setting that means nothing here.
    """
    if name == _OLD_BACKEND:
        backend, *options = value.replace(",", ":").split(":")
        disabled = [_setting(name, option.replace("-", "_"), True) for option in options if option != "no-fallback"]
        return _setting(name, "backend", backend) + [flag for flags in disabled for flag in flags]
    if name == _OLD_WHITESPACE:
        return _setting(name, "disable_any_whitespace", True)
    if name == _OLD_PROPERTIES:
        return _setting(name, "disable_additional_properties", True)
    if name.startswith(f"{CONFIG}."):
        key = name.removeprefix(f"{CONFIG}.").replace("-", "_")
        return _setting(name, key, {"true": True, "false": False}.get(value.lower(), value))
    try:
        settings = json.loads(value)
    except (ValueError, RecursionError):
        settings = value
    return _flags(name, {} if settings is None else settings)


def _setting(name: str, key: str, value: Any) -> list[str]:
    return _flags(name, {key: value})


def _flags(name: str, settings: Any) -> list[str]:
    flags: list[str] = []
    for setting, value in guide_settings(settings, label=name).items():
        flag = setting.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return flags
