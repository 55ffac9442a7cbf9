"""vLLM's flags for structured outputs, as ours."""

import json
from typing import Any

from troupellm.protocol.errors import ConfigError

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
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{name} must be a JSON object", param=name)
    return [flag for key, wanted in settings.items() for flag in _setting(name, key, wanted)]


def _setting(name: str, key: str, value: Any) -> list[str]:
    match key, value:
        case "backend", str():
            return ["--guide-backend", value]
        case "disable_any_whitespace", bool():
            return ["--no-guide-any-whitespace" if value else "--guide-any-whitespace"]
        case "disable_additional_properties", bool():
            return ["--no-guide-additional-properties" if value else "--guide-additional-properties"]
        case ("disable_fallback", bool()) | ("enable_in_reasoning", False) | ("reasoning_parser", str()):
            return []  # no backend is ever replaced; guides sleep until thinking ends; the parser has a flag of its own
    known = "backend, disable_any_whitespace, disable_additional_properties"
    raise ConfigError(f"{name}: {key} is not supported with {value!r}; use {known}", param=name)
