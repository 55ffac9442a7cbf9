"""`--help=TEXT` as in vLLM: the flags of one group, one flag, or all flags whose names hold a text."""

import argparse
from collections.abc import Sequence

from troupellm.protocol.vllm.flags import REFUSED
from troupellm.server.cli.flags import add_flag, config_flags

_GROUPS = {"frontend": "server", "parallel": "worker", "device": "worker", "structuredoutputs": "guide"}
"""Groups of vLLM by another name."""


def wanted_help(arguments: Sequence[str]) -> str | None:
    """The text behind `--help=`, if a command line has it."""
    return next((word.partition("=")[2] for word in arguments if word.startswith("--help=")), None)


def filtered_help(text: str) -> str:
    """The help text to print.

    Args:
        text: `all`, `listgroup`, a group such as `model` or `ModelConfig`, a flag's name, or a part of names.
    """
    flags = list(config_flags())
    sections = list(dict.fromkeys(flag.section for flag in flags))
    wanted = text.strip().lower().lstrip("-").replace("_", "-")
    if wanted == "listgroup":
        return "groups of flags: " + ", ".join(sections) + "\n"
    group = wanted.removesuffix("config").replace("-", "")
    group = _GROUPS.get(group, group)
    exact = [flag for flag in flags if flag.option == f"--{wanted}"]
    if wanted in ("all", "page", ""):
        chosen = flags
    elif group in sections:
        chosen = [flag for flag in flags if flag.section == group]
    else:
        chosen = exact or [flag for flag in flags if wanted in flag.option]
    if not chosen:
        if sentence := REFUSED.get(wanted):
            return f"--{wanted} is known from vLLM but not supported here: {sentence}\n"
        return f"no flag has {text!r} in its name; --help=listgroup lists the groups\n"
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    groups = {section: parser.add_argument_group(section) for section in sections}
    for flag in chosen:
        add_flag(groups[flag.section], flag)
    return parser.format_help()
