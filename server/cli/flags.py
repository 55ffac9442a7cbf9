"""Command-line flags, environment variables and TOML keys, all made from the configuration Structs.

A field `max_num_seqs` is the flag `--max-num-seqs` (or `--max_num_seqs`), the variable `TROUPE_MAX_NUM_SEQS` and the
key `max_num_seqs` of a `--config` file, there either at the top or in its section. Precedence: flag, environment, file.
"""

import argparse
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from troupellm.protocol.config import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.sizes import human_int
from troupellm.server.cli.guide_flags import guide_flags, is_guide_flag, takes_value
from troupellm.server.cli.vllm_flags import ELSEWHERE, ONE_DEVICE, SHORT

ENV_PREFIX = "TROUPE_"
SEVERAL = frozenset({"served_model_name", "cudagraph_capture_sizes"})
"""List flags that take several words at once, as vLLM's do; the others are repeated."""
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    section: str
    help: str
    default: Any
    is_bool: bool
    is_int: bool
    is_list: bool
    choices: tuple[str, ...]

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def config_flags() -> Iterator[Flag]:
    """One flag per field of the engine's and the server's configuration, in their order."""
    for section in msgspec.structs.fields(EngineConfig):
        yield from _struct_flags(section.type, section.name)
    yield from _struct_flags(ServerConfig, "server")


def _struct_flags(struct: type[msgspec.Struct], section: str) -> Iterator[Flag]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, inspect.VarTupleType) and isinstance(field.type.item_type, inspect.StructType):
            continue  # a table: comes from a file of its own
        description, kinds, choices = "", [], []
        pending: list[Any] = [field.type]
        while pending:
            kind = pending.pop()
            if isinstance(kind, inspect.Metadata):
                description = str((kind.extra_json_schema or {}).get("description", description))
                pending.append(kind.type)
            elif isinstance(kind, inspect.UnionType):
                pending.extend(kind.types)
            elif isinstance(kind, inspect.LiteralType):
                choices = [str(value) for value in kind.values]
                kinds.append(kind)
            else:
                kinds.append(kind)
        is_int = any(isinstance(kind, inspect.IntType) for kind in kinds)
        yield Flag(
            name=field.name,
            section=section,
            help=description,
            default=field.default,
            is_bool=any(isinstance(kind, inspect.BoolType) for kind in kinds),
            is_int=is_int,
            is_list=any(isinstance(kind, inspect.VarTupleType) for kind in kinds),
            choices=tuple(choices) if choices and not is_int else (),
        )


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add every configuration flag, grouped by section. Absent flags leave no attribute behind."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    groups: dict[str, Any] = {}
    for flag in config_flags():
        group = groups.setdefault(flag.section, parser.add_argument_group(flag.section))
        keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"config_{flag.name}"}
        keywords["help"] = flag.help.replace("%", "%%") + (
            f" (default: {flag.default})" if flag.default not in (None, ()) else ""
        )
        if flag.is_bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif flag.is_list:
            # A key never takes the word after it along: that may be the model.
            several = {"nargs": "+", "action": "extend"} if flag.name in SEVERAL else {"action": "append"}
            keywords.update(metavar=flag.name.upper(), **several)
        else:
            keywords["metavar"] = flag.name.upper()
            if flag.choices:
                keywords.update(choices=flag.choices, metavar=None)
        group.add_argument(flag.option, **keywords)


def normalise(argv: Sequence[str]) -> list[str]:
    """Accept `--foo_bar` for `--foo-bar`."""
    result = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        result.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return result


def translate(argv: Sequence[str]) -> list[str]:
    """Accept what vLLM's and llama.cpp's users type after `serve`; refuse flags that we know but do not have.

    Raises:
        ConfigError: a flag of vLLM that means nothing here; says what to use.
    """
    flags = {flag.option: flag for flag in config_flags()}
    result: list[str] = []
    pending = list(normalise(argv))
    while pending:
        name, equals, value = pending.pop(0).partition("=")
        name = SHORT.get(name, name)
        plain = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        if is_guide_flag(name):
            if not equals and takes_value(name):
                value = pending.pop(0) if pending else ""
            result += guide_flags(name, value)
        elif name in flags and flags[name].is_bool and equals:
            result.append(name if _parse(flags[name], value) else "--no-" + name.removeprefix("--"))
        elif name not in flags and plain not in flags and (reason := ELSEWHERE.get(plain.removeprefix("--"))):
            given = value if equals else (pending[0] if pending else "")
            if reason is not ONE_DEVICE or given != "1":
                raise ConfigError(f"{name} is known from vLLM but not supported here: {reason}", param=name)
            del pending[: 0 if equals else 1]
        else:
            result.append(name + equals + value)
    return result


def load_configs(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """Merge file, environment and flags into the two checked configurations.

    Raises:
        ConfigError: an unknown or wrong setting; names it and where it came from.
    """
    flags = {flag.name: flag for flag in config_flags()}
    settings: dict[str, Any] = {}
    if arguments.config:
        for name, value in _read_toml(Path(arguments.config), flags.values()).items():
            if name not in flags:
                raise ConfigError(f"{arguments.config}: unknown setting {name}", param=name)
            settings[name] = _parse(flags[name], value)
    for name, flag in flags.items():
        if text := environment.get(ENV_PREFIX + name.upper()):
            words = [word for part in text.split(",") if (word := part.strip())]
            settings[name] = _parse(flag, words if flag.is_list else text)
        if hasattr(arguments, f"config_{name}"):
            settings[name] = _parse(flag, getattr(arguments, f"config_{name}"))
    server = {name: settings.pop(name) for name in list(settings) if flags[name].section == "server"}
    return EngineConfig.from_flat(settings), server_config(server)


def server_config(settings: dict[str, Any]) -> ServerConfig:
    try:
        return msgspec.convert(settings, ServerConfig)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{path.rstrip('`')}: {text}", param=path.rstrip("`")) from None


def _read_toml(path: Path, known: Collection[Flag]) -> dict[str, Any]:
    """Settings of a file, without their sections; a table that is a setting's and no section is its value."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="config") from None
    flat: dict[str, Any] = {}
    tables = {flag.name for flag in known} - {flag.section for flag in known}
    for key, value in content.items():
        is_section = isinstance(value, dict) and key.replace("-", "_") not in tables
        flat.update(value if is_section else {key: value})
    return {key.replace("-", "_"): value for key, value in flat.items()}


def _parse(flag: Flag, value: Any) -> Any:
    """Text to the field's type; TOML values that have it already pass."""
    if not isinstance(value, str):
        return tuple(value) if flag.is_list and isinstance(value, list) else value
    if flag.is_list:
        return (value,)
    if value.lower() in ("none", "null") and flag.default is None:
        return None
    try:
        if flag.is_bool:
            return _BOOLEANS[value.lower()]
        if flag.is_int:
            return value if value == "auto" else ("auto" if value == "-1" else human_int(value))
        if isinstance(flag.default, float) or flag.name.endswith(("_interval", "_timeout")):
            return float(value)
    except (ValueError, KeyError):
        raise ConfigError(f"{flag.option}: {value!r} is not understood", param=flag.name) from None
    return value
