"""Sentences for words that no command takes, and for keys that no configuration file has."""

import argparse
import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.server.cli.guide_flags import is_guide_flag

_GUIDE_KEYS = "use guide_backend, guide_any_whitespace and guide_additional_properties"
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def unknown(rest: Sequence[str], parser: argparse.ArgumentParser, arguments: Sequence[str]) -> ConfigError:
    """The first flag among them is named, and the closest one that there is.

    Args:
        rest: what the parser did not take.
        arguments: the whole line.
    """
    flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
    if flag is None:
        return ConfigError(f"unrecognized arguments: {' '.join(rest)}")
    command = "troupellm" if arguments[0].startswith("-") else f"troupellm {arguments[0]}"
    known = {option.lstrip("-"): option for option in _options(parser, arguments) if option.startswith("--")}
    close = get_close_matches(flag.lstrip("-"), known, n=1)
    hint = f"the closest one is {known[close[0]]}" if close else f"{command} --help lists them"
    return ConfigError(f"{flag} is no flag of {command}; {hint}", param=flag)


def _options(parser: argparse.ArgumentParser, words: Collection[str]) -> Iterator[str]:
    """Of the commands that were named."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                if name in words:
                    yield from _options(inner, words)
        else:
            yield from action.option_strings


def of_vllm(file: Path, name: str) -> ConfigError | None:
    """The sentence for a key that is a flag of vLLM: the flag's, in keys.

    Args:
        name: with underscores.
    """
    flag = name.replace("_", "-")
    whole = flag.partition(".")[0]
    refused = REFUSED.get(whole) or REFUSED.get(whole.removeprefix("no-"))
    sentence = _GUIDE_KEYS if is_guide_flag(f"--{flag}") else refused
    if sentence is None:
        return None
    keys = _FLAG.sub(lambda found: found[1].replace("-", "_"), sentence)
    return ConfigError(f"{file}: {name} is known from vLLM but not supported here: {keys}", param=name)


def unknown_setting(file: Path, name: str, known: Collection[str]) -> ConfigError:
    """A key of a file that is none of the `known` ones is answered with the closest, or with what vLLM's users need."""
    close = get_close_matches(name, known, n=1)
    hint = f"; the closest one is {close[0]}" if close else ""
    return of_vllm(file, name) or ConfigError(f"{file}: unknown setting {name}{hint}", param=name)
