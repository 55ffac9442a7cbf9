"""Flags that take a JSON object, given key by key as vLLM's users do: `--speculative-config.method ngram`.

Keys go into the object that the flag itself gives, if it does; the later of two equal keys counts. A key that ends in
`+` adds an entry to a list.
"""

import json
from typing import Any

from troupellm.protocol.errors import ConfigError

OBJECTS = frozenset(
    {
        "speculative_config",
        "override_generation_config",
        "pooler_config",
        "kv_transfer_config",
        "limit_mm_per_prompt",
        "mm_processor_kwargs",
    }
)
"""Settings whose value is a JSON object."""


class JsonKeys:
    """Collects the keys of one command line."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Any]] = {}

    def add(self, flag: str, path: str, text: str) -> None:
        """Take one key.

        Args:
            flag: with its dashes, without the key.
            path: names of keys with dots between them.
            text: the value, as JSON or as a plain text.

        Raises:
            ConfigError: the key contradicts an earlier one.
        """
        *outer, last = path.replace("-", "_").split(".")
        holder = self._objects.setdefault(flag, {})
        for key in outer:
            holder = holder.setdefault(key, {})
            if not isinstance(holder, dict):
                raise _wrong(flag, path)
        if not last.endswith("+"):
            holder[last] = _value(text)
            return
        entries = holder.setdefault(last.removesuffix("+"), [])
        if not isinstance(entries, list):
            raise _wrong(flag, path)
        entries.append(_value(text))

    def merged_into(self, words: list[str]) -> list[str]:
        """The command line with one whole object for each flag that had keys.

        Raises:
            ConfigError: the flag itself was given something other than a JSON object.
        """
        for flag, keys in self._objects.items():
            words, whole = _without(words, flag)
            words = [*words, f"{flag}={json.dumps(_joined(whole, keys))}"]
        return words


def _wrong(flag: str, path: str) -> ConfigError:
    return ConfigError(f"{flag}.{path} contradicts an earlier key of {flag}", param=flag)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _without(words: list[str], flag: str) -> tuple[list[str], dict[str, Any]]:
    """The words without the flag and its value, and the last of these values."""
    rest, whole, pending = list[str](), dict[str, Any](), list(words)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        text = value if equals else (pending.pop(0) if pending else "")
        found = _value(text)
        if not isinstance(found, dict):
            raise ConfigError(f"{flag} must be a JSON object", param=flag)
        whole = found
    return rest, whole


def _joined(whole: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    joined = dict(whole)
    for key, value in keys.items():
        old = joined.get(key)
        joined[key] = _joined(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return joined
