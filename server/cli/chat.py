"""`troupellm chat`: talk to a running server."""

import argparse
import sys
from typing import Any

from troupellm.server.cli.client import ClientError, Server, Stats, add_client_flags, common_fields, converse


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    add_client_flags(parser)
    parser.add_argument("--system-prompt", help="first message of the conversation")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 with one line about what went wrong."""
    history: list[dict[str, Any]] = []
    if args.system_prompt:
        history.append({"role": "system", "content": args.system_prompt})

    def answer(server: Server, message: str) -> None:
        history.append({"role": "user", "content": message})
        try:
            text = _stream(server, args, history)
        except (ClientError, KeyboardInterrupt):
            history.pop()  # what was not answered is not part of the conversation
            raise
        history.append({"role": "assistant", "content": text})

    return converse(args, answer)


def _stream(server: Server, args: argparse.Namespace, messages: list[dict[str, Any]]) -> str:
    """Print the answer as it comes; give it whole."""
    stats = Stats()
    pieces: list[str] = []
    try:
        for choice in server.stream("/chat/completions", {"messages": messages, **common_fields(args)}, stats):
            delta = choice.get("delta", {})
            if thought := delta.get("reasoning_content"):
                stats.piece()
                print(thought, end="", file=sys.stderr, flush=True)  # not part of the answer
            if piece := delta.get("content"):
                stats.piece()
                pieces.append(piece)
                print(piece, end="", flush=True)
    finally:
        if pieces:
            print(flush=True)
    if args.stats:
        print(f"[{stats}]", flush=True)
    return "".join(pieces)
