"""Flags of `bench start`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--rounds", type=count, default=5, help="starts whose medians count")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the server, such as --serve-arg=--no-worker-process",
    )
    parser.add_argument("--result-json", metavar="FILE")
