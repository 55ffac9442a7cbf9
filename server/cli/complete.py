"""`troupellm complete`: let a running server continue a text."""

import argparse

from troupellm.server.cli.client import Server, Stats, add_client_flags, common_fields, converse


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("complete", help="complete text with a running server", allow_abbrev=False)
    add_client_flags(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 with one line about what went wrong."""

    def answer(server: Server, prompt: str) -> None:
        stats = Stats()
        printed = False
        try:
            for choice in server.stream("/completions", {"prompt": prompt, **common_fields(args)}, stats):
                if piece := choice.get("text"):
                    stats.piece()
                    printed = True
                    print(piece, end="", flush=True)
        finally:
            if printed:
                print(flush=True)
        if args.stats:
            print(f"[{stats}]", flush=True)

    return converse(args, answer)
