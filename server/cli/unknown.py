"""What to say of words that no command takes."""

import argparse
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches

from troupellm.protocol.errors import ConfigError


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
