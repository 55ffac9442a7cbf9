"""The `troupellm` command. Light to import: nothing here pulls torch, and only the chosen command is loaded."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from troupellm.server.base.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from troupellm.server.cli.inherited import make_usable
from troupellm.server.cli.output import give_up_output

Register = Callable[["argparse._SubParsersAction[argparse.ArgumentParser]"], None]

_COMMANDS = {
    "serve": ("troupellm.server.cli.serve", "start the server"),
    "run-batch": ("troupellm.server.cli.run_batch", "answer a file of requests"),
    "chat": ("troupellm.server.cli.chat", "talk to a running server"),
    "complete": ("troupellm.server.cli.complete", "complete text with a running server"),
    "collect-env": ("troupellm.server.cli.collect_env", "print what a bug report needs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `exit_codes`.

    Args:
        argv: the command; None is that of the process, and its inherited state is made usable first.
    """
    if argv is None:
        make_usable()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `troupellm ... | head`
        give_up_output()
        return EXIT_FAILED


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="troupellm", description="An LLM inference and serving engine.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"troupellm {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        if name == chosen:
            import_module(module).register(subparsers)
        else:
            subparsers.add_parser(name, help=summary, add_help=False, allow_abbrev=False)
    for plugin in entry_points(group="troupellm.commands"):
        if plugin.name == chosen:
            register: Register = plugin.load()
            register(subparsers)
        else:
            subparsers.add_parser(plugin.name, help="load tests and benchmarks", add_help=False, allow_abbrev=False)
    return parser


def _run(arguments: list[str]) -> int:
    from troupellm.protocol.errors import ConfigError
    from troupellm.server.cli.flags import normalise, translate
    from troupellm.server.cli.help_filter import filtered_help, wanted_help

    try:
        if arguments[:1] in (["serve"], ["run-batch"]) and (text := wanted_help(arguments)) is not None:
            print(filtered_help(text), end="")
            return EXIT_OK
        spelt = translate(arguments) if arguments[:1] in (["serve"], ["run-batch"]) else normalise(arguments)
        parser = _parser(arguments[0] if arguments else "")
        namespace, rest = parser.parse_known_args(spelt)
        if rest:
            from troupellm.server.cli.unknown_flags import unknown

            raise unknown(rest, parser, arguments)
        return int(namespace.func(namespace))
    except ConfigError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        return EXIT_USAGE


def _version() -> str:
    import troupellm

    return troupellm.__version__


if __name__ == "__main__":
    sys.exit(main())
