"""`EngineArgs`: the engine's settings as vLLM's scripts hold them, from the command line too.

Fields are the settings of `EngineConfig`, flat, and those of vLLM that are accepted with values that change nothing.
"""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any, Self, TypeVar

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.protocol.vllm.settings import NO_EFFECT, STRUCTURED
from troupellm.protocol.vllm.values import ACCEPTED, is_switch
from troupellm.server.cli.flags import Flag, config_flags, parse_value

ParserT = TypeVar("ParserT", bound=argparse._ActionsContainer)

_FLAGS = {flag.name: flag for flag in config_flags() if flag.section != "server"}
_DEFAULTS: dict[str, Any] = {
    **{name: flag.default for name, flag in _FLAGS.items()},
    **{flag.replace("-", "_"): ACCEPTED.get(flag, (None,))[0] for flag in REFUSED},
    **dict.fromkeys(NO_EFFECT, False),
    STRUCTURED: None,
}


def _field(default: Any) -> Any:
    """Each object has a dictionary of its own."""
    return dataclasses.field(default_factory=default.copy) if isinstance(default, dict) else default


if TYPE_CHECKING:
    _Fields = Any
else:
    _Fields = dataclasses.make_dataclass("_Fields", [(name, Any, _field(value)) for name, value in _DEFAULTS.items()])


class EngineArgs(_Fields):  # type: ignore[misc]
    """See the module. Fields may be assigned until the configuration is made."""

    @staticmethod
    def add_cli_args(parser: ParserT) -> ParserT:
        """Add a flag for every field."""
        for flag in _FLAGS.values():
            _add(parser, flag)
        for name in _DEFAULTS.keys() - _FLAGS.keys():
            _add_hidden(parser, name)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The fields that a parser's result has."""
        return cls(**{name: getattr(args, name) for name in _DEFAULTS if hasattr(args, name)})

    def create_engine_config(self, *_: object, **__: object) -> EngineConfig:
        """The settings, checked and converted. Arguments of vLLM's method change nothing.

        Raises:
            ConfigError: a value is wrong, or asks for what is not supported.
        """
        config = EngineConfig.from_flat({name: getattr(self, name) for name in _DEFAULTS})
        config.check()
        return config


class AsyncEngineArgs(EngineArgs):
    """The same; vLLM has a field more, which changes nothing here."""

    @staticmethod
    def add_cli_args(parser: ParserT, async_args_only: bool = False) -> ParserT:
        """As `EngineArgs`; none where only those of the asynchronous engine are wanted, which has none of its own."""
        return parser if async_args_only else EngineArgs.add_cli_args(parser)


class _Parsed(argparse.Action):
    """Stores a text as the type of its setting."""

    def __init__(self, *args: Any, flag: Flag, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        try:
            setattr(namespace, self.dest, parse_value(self._flag, values))
        except ConfigError as error:
            parser.error(error.message)


def _add(parser: argparse._ActionsContainer, flag: Flag) -> None:
    help_text = flag.help.replace("%", "%%")
    if flag.is_bool:
        parser.add_argument(
            flag.option, dest=flag.name, default=flag.default, action=argparse.BooleanOptionalAction, help=help_text
        )
        return
    keywords: dict[str, Any] = {"nargs": "+"} if flag.is_list else {}
    if flag.choices:
        keywords["choices"] = flag.choices if flag.default is not None else (*flag.choices, "None")
    parser.add_argument(
        flag.option, dest=flag.name, default=flag.default, action=_Parsed, flag=flag, help=help_text, **keywords
    )


def _add_hidden(parser: argparse._ActionsContainer, name: str) -> None:
    """A flag of vLLM that no help shows; its value is checked when the configuration is made."""
    flag = name.replace("_", "-")
    keywords: dict[str, Any] = {"dest": name, "default": _DEFAULTS[name], "help": argparse.SUPPRESS}
    if is_switch(flag) or name in NO_EFFECT:
        parser.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, **keywords)
    else:
        parser.add_argument(f"--{flag}", type=_value, nargs="?", const=True, **keywords)


def _value(text: str) -> Any:
    """A JSON value, or a plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
