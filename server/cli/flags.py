"""Command-line flags, environment variables and TOML keys, all made from the configuration Structs.

A field `max_num_seqs` is the flag `--max-num-seqs` (or `--max_num_seqs`), the variable `TROUPE_MAX_NUM_SEQS` and the
key `max_num_seqs` of a `--config` file, there either at the top or in its section. Precedence: flag, environment, file.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from troupellm.protocol.allowed_values import with_allowed_values
from troupellm.protocol.config import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.sizes import human_int
from troupellm.server.cli.guide_flags import guide_flags, is_guide_flag, takes_value
from troupellm.server.cli.unknown import of_vllm, says_one_device, unknown_setting
from troupellm.server.cli.vllm_flags import ONE_DEVICE, SHORT
from troupellm.server.cli.vllm_further import REFUSED

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
    of_ints: bool
    """A list of whole numbers."""
    takes_auto: bool
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
        takes_auto = "auto" in choices and any(isinstance(kind, inspect.IntType) for kind in kinds)
        yield Flag(
            name=field.name,
            section=section,
            help=description,
            default=field.default,
            is_bool=any(isinstance(kind, inspect.BoolType) for kind in kinds),
            is_int=any(map(_is_whole, kinds)),
            is_list=any(isinstance(kind, inspect.VarTupleType) for kind in kinds),
            of_ints=any(
                isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.IntType) for kind in kinds
            ),
            takes_auto=takes_auto,
            choices=() if takes_auto else tuple(choices),
        )


def _is_whole(kind: Any) -> bool:
    """Whether it is a whole number, or one of a few."""
    several = isinstance(kind, inspect.LiteralType) and all(isinstance(value, int) for value in kind.values)
    return several or isinstance(kind, inspect.IntType)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add every configuration flag, grouped by section. Absent flags leave no attribute behind."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    groups: dict[str, Any] = {}
    for flag in config_flags():
        group = groups.setdefault(flag.section, parser.add_argument_group(flag.section))
        keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"config_{flag.name}"}
        keywords["help"] = flag.help.replace("%", "%%") + _default_text(flag)
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


def _default_text(flag: Flag) -> str:
    """The default as one would type it; nothing where there is none, or the help text says it."""
    value = flag.default
    if value in (None, (), "") or "(default:" in flag.help:
        return ""
    if flag.is_bool:
        value = "on" if value else "off"
    elif flag.is_list:
        value = " ".join(map(str, value))
    elif flag.name.endswith("_bytes") and not value % 2**20:
        value = f"{value >> 30}GiB" if not value % 2**30 else f"{value >> 20}MiB"
    return f" (default: {value})"


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
        ConfigError: a flag of vLLM that means nothing here; says what to use. Or a key of a flag that takes an object.
    """
    flags = {flag.option: flag for flag in config_flags()}
    result: list[str] = []
    pending = list(normalise(argv))
    while pending:
        name, equals, value = pending.pop(0).partition("=")
        name = _long(name)
        plain = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        whole, dot, _ = plain.partition(".")
        if is_guide_flag(name):
            if not equals and takes_value(name):
                value = pending.pop(0) if pending else ""
            result += guide_flags(name, value)
        elif name in flags and flags[name].is_bool and equals:
            result.append(name if _parse(flags[name], value) else "--no-" + name.removeprefix("--"))
        elif name in flags or plain in flags or not name.startswith("--"):
            result.append(name + equals + value)
        elif reason := REFUSED.get(whole.removeprefix("--")):
            given = value if equals else (pending[0] if pending else "")
            if reason is not ONE_DEVICE or given != "1":
                raise ConfigError(f"{name} is known from vLLM but not supported here: {reason}", param=name)
            del pending[: 0 if equals else 1]
        elif dot and whole in flags:
            raise ConfigError(f"{name} is not understood: give {whole} its whole value, as one JSON object", param=name)
        else:
            result.append(name + equals + value)
    return result


def _long(name: str) -> str:
    """The long spelling of a short flag, of `-O3` and `-cc.mode` too."""
    short, dot, key = name.partition(".")
    if short.startswith("-O") and short[2:].isdigit():
        short = "-O"
    return SHORT.get(short, short) + dot + key


def load_configs(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """Merge file, environment and flags into the two checked configurations.

    Raises:
        ConfigError: an unknown or wrong setting; names it and where it came from.
    """
    flags = {flag.name: flag for flag in config_flags()}
    given: dict[str, tuple[Any, str]] = {}
    if arguments.config:
        for name, value in _read_toml(Path(arguments.config), flags).items():
            given[name] = value, f"{arguments.config}: {name}"
    for name, flag in flags.items():
        variable = ENV_PREFIX + name.upper()
        if text := environment.get(variable):
            words = [word for part in text.split(",") if (word := part.strip())]
            given[name] = (words if flag.is_list else text), variable
        if hasattr(arguments, f"config_{name}"):
            given[name] = getattr(arguments, f"config_{name}"), name
    try:
        settings = {name: _parse(flags[name], value) for name, (value, _) in given.items()}
        server = {name: settings.pop(name) for name in list(settings) if flags[name].section == "server"}
        return EngineConfig.from_flat(settings), server_config(server)
    except ConfigError as error:
        name = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        origin = given[name][1] if name in given else name
        if origin == name:
            raise
        known = error.message.startswith(name)
        text = origin + error.message.removeprefix(name) if known else f"{origin}: {error.message}"
        raise ConfigError(text, param=error.param, code=error.code) from None


def server_config(settings: dict[str, Any]) -> ServerConfig:
    try:
        return msgspec.convert(settings, ServerConfig)
    except msgspec.ValidationError as error:
        text, _, path = with_allowed_values(error, ServerConfig).partition(" - at `$.")
        raise ConfigError(f"{path.rstrip('`')}: {text}", param=path.rstrip("`")) from None


def _read_toml(path: Path, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Settings of a file, at the top or in their sections; a table that is a setting's and no section is its value."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", param="config") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="config") from None
    sections = {flag.section for flag in flags.values()}
    found: dict[str, Any] = {}
    for key, value in content.items():
        section = key.replace("-", "_")
        if not isinstance(value, dict) or section in flags.keys() - sections:
            _add_setting(found, path, flags, key, value)
            continue
        if section not in sections:
            text = f"{path}: unknown section {key}; there are {', '.join(sorted(sections))}"
            raise of_vllm(path, section) or ConfigError(text, param=section)
        for inner, setting in value.items():
            _add_setting(found, path, flags, inner, setting, section)
    return found


def _add_setting(
    found: dict[str, Any], path: Path, flags: Mapping[str, Flag], key: str, value: Any, section: str | None = None
) -> None:
    name = key.replace("-", "_")
    if name not in flags:
        if says_one_device(name, value):
            return
        raise unknown_setting(path, name, flags)
    if section not in (None, flags[name].section):
        raise ConfigError(f"{path}: {name} belongs to the section {flags[name].section}, not to {section}", param=name)
    if name in found:
        raise ConfigError(f"{path}: {name} is given twice", param=name)
    found[name] = value


def _parse(flag: Flag, value: Any) -> Any:
    """Text to the field's type; TOML values that have it already pass."""
    if flag.takes_auto and value in ("auto", "-1", -1):
        return "auto"
    if flag.is_list and isinstance(value, list):
        return tuple(_whole(flag, item) if flag.of_ints and isinstance(item, str) else item for item in value)
    if not isinstance(value, str):
        return value
    if flag.is_list:
        return (value,)
    if value.lower() in ("none", "null") and flag.default is None:
        return None
    try:
        if flag.is_bool:
            return _BOOLEANS[value.lower()]
        if flag.is_int:
            return human_int(value)
        if isinstance(flag.default, float) or flag.name.endswith(("_interval", "_timeout")):
            return float(value)
    except (ValueError, KeyError):
        raise ConfigError(f"{flag.name}: {value!r} is not understood", param=flag.name) from None
    return value


def _whole(flag: Flag, text: str) -> int:
    try:
        return human_int(text)
    except ValueError:
        raise ConfigError(f"{flag.name}: {text!r} is not understood", param=flag.name) from None
