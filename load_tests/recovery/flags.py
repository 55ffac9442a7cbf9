"""Flags of `bench recovery`."""

import argparse

from troupellm.load_tests.serve.flags import count

SIDES = ("spare", "no-spare")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="with and without a spare worker"
    )
    parser.add_argument("--rounds", type=count, default=3, help="kills of each side, a fresh server for each")
    parser.add_argument("--streams", type=count, default=32, help="answers that are under way at the kill")
    parser.add_argument("--max-tokens", type=count, default=256, help="of each answer")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the servers, such as --serve-arg=--batch-invariant",
    )
    parser.add_argument(  # so that the refusal says why
        "--no-worker-process",
        dest="serve_arg",
        action="append_const",
        const="--no-worker-process",
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--result-json", metavar="FILE")
