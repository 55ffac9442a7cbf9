"""Settings of a `--config` file: TOML, or YAML as vLLM's users write it.

Keys are settings, at the top or in their sections. A table that is a setting and no section is its value.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.protocol.vllm.values import REMOTE_CODE, accepts, check_refused
from troupellm.server.cli.unknown_flags import of_vllm, unknown_setting

if TYPE_CHECKING:
    from troupellm.server.cli.flags import Flag

YAML = (".yaml", ".yml")
MODEL_KEYS = ("model_tag",)
"""Other names of the key `model` in vLLM's files."""


def read_config_file(path: Path, flags: Mapping[str, "Flag"]) -> dict[str, Any]:
    """
    Args:
        flags: all settings by their names.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or a key twice; names the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = _read_yaml(path, text) if path.suffix in YAML else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", param="config") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="config") from None
    sections = {flag.section for flag in flags.values()}
    found: dict[str, Any] = {}
    for key, value in content.items():
        section = key.replace("-", "_")
        if not isinstance(value, dict) or section in flags.keys() - sections or _may_be_set(section, value):
            _add_setting(found, path, flags, key, value)
            continue
        if section not in sections:
            text = f"{path}: unknown section {key}; there are {', '.join(sorted(sections))}"
            raise of_vllm(path, section) or ConfigError(text, param=section)
        for inner, setting in value.items():
            _add_setting(found, path, flags, inner, setting, section)
    return found


def _may_be_set(name: str, value: Any) -> bool:
    """Whether a key is a setting of vLLM whose value says how this engine works anyway."""
    flag = name.replace("_", "-")
    return flag in REFUSED and (accepts(flag, value) or (flag == REMOTE_CODE and value is True))


def _add_setting(
    found: dict[str, Any],
    path: Path,
    flags: Mapping[str, "Flag"],
    key: str,
    value: Any,
    section: str | None = None,
) -> None:
    name = key.replace("-", "_")
    name = "model" if name in MODEL_KEYS else name
    if name not in flags:
        if _may_be_set(name, value):
            check_refused(name.replace("_", "-"), value, label=f"{path}: {name}")
            return
        raise unknown_setting(path, name, flags)
    if section not in (None, flags[name].section):
        raise ConfigError(f"{path}: {name} belongs to the section {flags[name].section}, not to {section}", param=name)
    if name in found:
        raise ConfigError(f"{path}: {name} is given twice", param=name)
    found[name] = value


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    """A mapping of plain values. Tags, anchors and keys that stand twice are refused.

    Raises:
        ConfigError: the file is none of that; names the line.
    """
    import yaml

    try:
        _check_tokens(path, text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        for mapping in _mappings(node):
            _check_keys(path, mapping)
        content = yaml.safe_load(text)
    except ConfigError:  # which is a ValueError
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}", param="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: must be a mapping of settings", param="config")
    return {key: value for key, value in content.items() if value is not None}


def _check_tokens(path: Path, text: str) -> None:
    import yaml

    refused = (yaml.TagToken, yaml.AnchorToken, yaml.AliasToken, yaml.DirectiveToken)
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, refused):
            kind = type(token).__name__.removesuffix("Token").lower()
            line = token.start_mark.line + 1
            raise ConfigError(f"{path}: line {line} has a YAML {kind}; only plain values are read", param="config")


def _mappings(node: Any) -> Iterator[Any]:
    import yaml

    pending = [node]
    while pending:
        match pending.pop():
            case yaml.MappingNode() as mapping:
                yield mapping
                pending.extend(value for _, value in mapping.value)
            case yaml.SequenceNode() as sequence:
                pending.extend(sequence.value)


def _check_keys(path: Path, mapping: Any) -> None:
    seen: set[str] = set()
    for key, _ in mapping.value:
        if str(key.value) in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"{path}: {key.value} is given twice (line {line})", param=str(key.value))
        seen.add(str(key.value))
