"""Flags of `bench soak`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, not_negative


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=finite, default=20.0, help="how long the traffic lasts, without the warm-up")
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--concurrency", type=count, default=12, help="clients at once")
    parser.add_argument(
        "--kill-every", type=not_negative, default=20.0, help="seconds between worker kills; 0 is never"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the server, such as --serve-arg=--port=9000",
    )
    parser.add_argument("--max-slope", type=not_negative, default=1.0, help="MiB/min of memory above which it fails")
    parser.add_argument("--result-json", metavar="FILE")
