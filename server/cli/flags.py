"""Command-line flags, environment variables and TOML keys, all made from the configuration Structs.

A field `max_num_seqs` is the flag `--max-num-seqs` (or `--max_num_seqs`), the variable `TROUPE_MAX_NUM_SEQS` and the
key `max_num_seqs` of a `--config` file, there either at the top or in its section. Precedence: flag, variable of ours,
variable of vLLM, file.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.config.sizes import human_int
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED, SHORT
from troupellm.protocol.vllm.values import check_refused, is_switch
from troupellm.server.cli.config_file import read_config_file
from troupellm.server.cli.guide_flags import guide_flags, is_guide_flag, takes_value
from troupellm.server.cli.json_keys import OBJECTS, JsonKeys
from troupellm.server.cli.vllm_environment import vllm_settings

ENV_PREFIX = "TROUPE_"
SEVERAL = frozenset({"served_model_name", "cudagraph_capture_sizes", "api_key", "lora_modules"})
"""List flags that take several words at once, as vLLM's do; the others are repeated."""
_KEYS = frozenset({"api_key", "admin_api_key"})
"""List flags whose words are taken as they are; a word of the others may be a JSON list."""
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
            default=_default(field),
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
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file with any of these settings")
    groups: dict[str, Any] = {}
    for flag in config_flags():
        add_flag(groups.setdefault(flag.section, parser.add_argument_group(flag.section)), flag)


def add_flag(group: Any, flag: Flag) -> None:
    """Add one flag to a group of a parser."""
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"config_{flag.name}"}
    keywords["help"] = flag.help.replace("%", "%%") + _default_text(flag)
    if flag.is_bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif flag.is_list:
        several = {"nargs": "+", "action": Several} if flag.name in SEVERAL else {"action": "append"}
        keywords.update(metavar=flag.name.upper(), **several)
    else:
        keywords["metavar"] = flag.name.upper()
        if flag.choices:
            keywords.update(choices=flag.choices, metavar=None)
            if flag.default is None:
                keywords["choices"] = (*flag.choices, "None")
    group.add_argument(flag.option, **keywords)


class Several(argparse.Action):
    """Extends a list by the words behind a flag. Notes that there were several: the last may be meant as the model."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])
        if len(values) > 1:
            namespace.several_words = option_string


def _default(field: inspect.Field) -> Any:
    """Of a setting; a value that can be changed is made anew."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


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
        ConfigError: a flag of vLLM that asks for what is not supported; says what to use. Or a key of a flag that takes
            no object.
    """
    flags = {flag.option: flag for flag in config_flags()}
    result: list[str] = []
    keys = JsonKeys()
    pending = list(normalise(argv))
    while pending:
        name, equals, value = long_spelling(pending.pop(0)).partition("=")
        plain = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        whole, dot, path = plain.partition(".")
        if is_guide_flag(name):
            if not equals and takes_value(name):
                value = pending.pop(0) if pending else ""
            result += guide_flags(name, value)
        elif name in flags and flags[name].is_bool and equals:
            result.append(name if parse_value(flags[name], value) else "--no-" + name.removeprefix("--"))
        elif name in flags or plain in flags or not name.startswith("--"):
            result.append(name + equals + value)
        elif (refused := whole.removeprefix("--")) in REFUSED:
            given: Any = value
            if not equals and is_switch(refused):
                given = plain == name
            elif not equals:
                given = pending.pop(0) if pending and not pending[0].startswith("--") else True
            check_refused(refused, {path: given} if dot else given, label=name)
        elif dot and whole.removeprefix("--").replace("-", "_") in OBJECTS:
            keys.add(whole, path, value if equals else (pending.pop(0) if pending else ""))
        elif dot and whole in flags:
            raise ConfigError(f"{name} is not understood: give {whole} its whole value, as one JSON object", param=name)
        else:
            result.append(name + equals + value)
    return keys.merged_into(result)


def long_spelling(word: str) -> str:
    """The long spelling of a short flag, of `-O3` and `-cc.mode` too."""
    if word.startswith("-O") and word[2:].isdigit():
        return f"{SHORT['-O']}={word[2:]}"
    name, equals, value = word.partition("=")
    short, dot, key = name.partition(".")
    return SHORT.get(short, short) + dot + key + equals + value


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
        for name, value in read_config_file(Path(arguments.config), flags).items():
            given[name] = value, f"{arguments.config}: {name}"
    for name, variable, value in vllm_settings(environment):
        given[name] = value, variable
    for name, flag in flags.items():
        variable = ENV_PREFIX + name.upper()
        if text := environment.get(variable):
            given[name] = (_words(flag, text) if flag.is_list else text), variable
        if hasattr(arguments, f"config_{name}"):
            given[name] = getattr(arguments, f"config_{name}"), name
    try:
        settings = {name: parse_value(flags[name], value) for name, (value, _) in given.items()}
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


def parse_value(flag: Flag, value: Any) -> Any:
    """Text to the field's type; values of a file that have it already pass.

    Raises:
        ConfigError: the text is none of that type.
    """
    if flag.takes_auto and value in ("auto", "-1", -1):
        return "auto"
    if flag.is_list and isinstance(value, list):
        value = [item for word in value for item in _items(flag, word)]
        return tuple(_whole(flag, item) if flag.of_ints and isinstance(item, str) else item for item in value)
    if not isinstance(value, str):
        return value
    if flag.is_list:
        return tuple(_items(flag, value))
    if value.lower() in ("none", "null") and flag.default is None:
        return None
    try:
        if isinstance(flag.default, dict):
            return json.loads(value)
        if flag.is_bool:
            return _BOOLEANS[value.lower()]
        if flag.is_int:
            return human_int(value)
        if isinstance(flag.default, float) or flag.name.endswith(("_interval", "_timeout", "_timeout_seconds")):
            return float(value)
    except (ValueError, KeyError):
        raise ConfigError(f"{flag.name}: {value!r} is not understood", param=flag.name) from None
    return value


def _whole(flag: Flag, text: str) -> int:
    try:
        return human_int(text)
    except ValueError:
        raise ConfigError(f"{flag.name}: {text!r} is not understood", param=flag.name) from None


def _words(flag: Flag, text: str) -> list[str]:
    """The entries of a list in a variable, with commas between them."""
    if len(_items(flag, text)) != 1:
        return [text]  # a JSON list, which has commas of its own
    return [word for part in text.split(",") if (word := part.strip())]


def _items(flag: Flag, word: Any) -> list[Any]:
    """The entries that one word of a list stands for: more than one if it is a JSON list."""
    if flag.name in _KEYS or not isinstance(word, str) or not word.lstrip().startswith("["):
        return [word]
    try:
        found = json.loads(word)
    except (ValueError, RecursionError):
        return [word]
    return found if isinstance(found, list) else [word]
